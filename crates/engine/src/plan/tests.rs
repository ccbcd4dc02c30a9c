//! Tests of the order that makes a plan safe, and of what it depends on.

use harvest_proto::launch::NetworkSettings;

use super::*;
use crate::spec::{Bind, Limits, VolumeMount};

fn record(network: Network) -> Record {
    Record {
        id: "sbx_0123456789ab".parse().unwrap(),
        layers: vec!["base".parse().unwrap(), "repo".parse().unwrap()],
        network,
        binds: vec![Bind { source: "/etc/ssl".into(), inside: "/etc/ssl".into() }],
        volumes: vec![VolumeMount {
            name: "notes".parse().unwrap(),
            inside: "/mnt/notes".into(),
            read_only: true,
        }],
        file_bytes: Some(7),
        ..Record::of_a_standby()
    }
}

fn facts() -> HostFacts {
    HostFacts {
        cgroups: Hierarchy::V2 { mount: "/sys/fs/cgroup".into() },
        group: "harvest-0".into(),
        resolv_conf: "nameserver 192.0.2.1\n".into(),
        ids: IdAllocation::PerSandbox,
        redirect: Redirect::Nftables,
        size: Box::leak(Box::new(HostSize {
            memory_bytes: 64 << 30,
            cpus: (0..8).collect(),
            cpuinfo: String::new(),
        })),
    }
}

fn planned(network: Network) -> Plan {
    plan(&record(network), &["/l/base".into(), "/l/repo".into()], &facts())
}

fn at(plan: &Plan, wanted: impl Fn(&Step) -> bool) -> usize {
    plan.steps.iter().position(wanted).unwrap()
}

#[test]
fn pid_1_only_drops_privileges_after_the_fork() {
    let plan = planned(Network::Door);
    let names: Vec<String> = plan
        .parts()
        .pid1
        .iter()
        .map(|step| serde_json::to_value(step).unwrap()["step"].as_str().unwrap().to_owned())
        .collect();
    let wanted = [
        "enter_user_namespace",
        "resource_limits",
        "capabilities",
        "no_new_privileges",
        "seccomp",
        "exec",
    ];
    assert_eq!(names, wanted);
}

#[test]
fn steps_before_the_assignment_are_equal_for_all() {
    let other = Record {
        id: "sbx_zzzzzzzzzzzz".parse().unwrap(),
        limits: Limits { memory_bytes: 1, cpu_millis_per_second: 1, pids: 1, ..Limits::default() },
        file_bytes: Some(1),
        env: [("A".to_owned(), "b".to_owned())].into(),
        ..record(Network::Door)
    };
    let facts = facts();
    let plans =
        [plan(&record(Network::Door), &["/l/base".into()], &facts), plan(&other, &[], &facts)];
    let before = plans.map(|plan| {
        let parts = plan.parts();
        let text = serde_json::to_string(&(parts.before_fork, parts.pid1)).unwrap();
        text.replace(plan.sandbox.part(), "")
    });
    assert_eq!(before[0], before[1]);
}

#[test]
fn supervisor_is_launched_after_privileges_are_dropped() {
    let plan = planned(Network::Door);
    let assigned = plan.parts().assigned;
    let [.., Step::Settle, Step::Root, Step::EnterUserNamespace, Step::Launch { .. }] = assigned
    else {
        panic!("{assigned:?}")
    };
}

#[test]
fn only_host_network_skips_net_namespace_and_loopback() {
    let has = |network, wanted: fn(&Step) -> bool| planned(network).steps.iter().any(wanted);
    let loopback: fn(&Step) -> bool = |step| matches!(step, Step::Loopback { .. });
    let net: fn(&Step) -> bool = |step| match step {
        Step::Clone { namespaces, .. } => namespaces.contains(&Namespace::Net),
        _ => false,
    };
    assert!(has(Network::Door, loopback) && has(Network::Door, net));
    assert!(!has(Network::Host, loopback) && !has(Network::Host, net));
}

#[test]
fn rootless_plan_shares_ids_and_needs_no_cgroup() {
    let facts = HostFacts { cgroups: Hierarchy::None, ids: IdAllocation::Shared, ..facts() };
    let plan = plan(&record(Network::Door), &["/l/base".into()], &facts);
    let pids = Limits::default().pids;
    assert_eq!(plan.steps[0], Step::ShareIds { count: IDS_PER_SANDBOX, processes: pids });
    assert!(
        !plan.steps.iter().any(|step| matches!(step, Step::MakeGroup(_) | Step::ClaimIds { .. }))
    );
}

#[test]
fn plan_names_the_redirect_mechanism() {
    let facts = HostFacts { redirect: Redirect::Iptables, ..facts() };
    let plan = plan(&record(Network::Door), &[], &facts);
    assert!(plan.to_string().contains("redirect=\"iptables\""), "{plan}");
}

#[test]
fn limits_are_shown_only_where_they_are_enforced() {
    let files = |facts: &HostFacts| -> Vec<PathBuf> {
        let plan = plan(&record(Network::Door), &[], facts);
        let file = |step: &Step| match step {
            Step::File { inside, .. } => Some(inside.clone()),
            _ => None,
        };
        plan.steps.iter().filter_map(file).collect()
    };
    let meminfo = PathBuf::from("/proc/meminfo");
    assert!(files(&facts()).contains(&meminfo));
    assert!(files(&facts()).contains(&"/proc/cpuinfo".into()));
    assert!(!files(&HostFacts { cgroups: Hierarchy::None, ..facts() }).contains(&meminfo));
    let small = Box::leak(Box::new(HostSize { memory_bytes: 1 << 30, ..HostSize::default() }));
    let small = HostFacts { size: small, ..facts() };
    assert!(!files(&small).iter().any(|file| file.starts_with("/proc")));
}

#[test]
fn topmost_layer_comes_first_in_overlay() {
    let plan = planned(Network::Door);
    assert!(plan.steps.contains(&Step::Overlay { lowers: vec!["1".into(), "0".into()] }));
}

#[test]
fn volumes_mount_last_before_entering_the_root() {
    let plan = planned(Network::Door);
    let volume = at(&plan, |step| matches!(step, Step::Volume { .. }));
    assert!(at(&plan, |step| matches!(step, Step::Bind { .. })) < volume);
    assert!(volume < at(&plan, |step| *step == Step::Root));
    let Step::Volume { from, .. } = &plan.steps[volume] else { unreachable!() };
    assert_eq!(from.number, 3, "two layers and a bind precede it");
}

#[test]
fn plan_prints_steps_and_roundtrips_json() {
    let plan = planned(Network::Door);
    assert_eq!(plan.to_string().lines().count(), plan.steps.len() + 1);
    assert!(plan.to_string().contains("capabilities keep=[\"chown\""));
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
}

#[test]
fn only_sandboxes_of_sessions_have_app_folder() {
    let has_app = |owner| {
        let record = Record { owner, ..record(Network::Door) };
        let steps = plan(&record, &[], &facts()).steps;
        steps.iter().any(|step| matches!(step, Step::Pid1Folder { writer: Descriptor::App, .. }))
    };
    assert!(has_app(Owner::Sessions));
    // An image may well have its own `/app`.
    assert!(!has_app(Owner::Standalone) && !has_app(Owner::Process(1)));
}

#[test]
fn only_network_settings_add_their_folder() {
    let has_folder = |certificates: &str| {
        let settings =
            NetworkSettings { certificates: certificates.to_owned(), ..NetworkSettings::default() };
        let steps = plan(&Record { settings, ..record(Network::Door) }, &[], &facts()).steps;
        let folder =
            |step: &Step| matches!(step, Step::Pid1Folder { writer: Descriptor::Settings, .. });
        steps.iter().any(folder)
    };
    assert!(has_folder("-----BEGIN CERTIFICATE-----") && !has_folder(""));
}
