//! The order that makes a plan safe, and what it depends on.

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
        ..Record::of_a_seed()
    }
}

fn facts() -> HostFacts {
    HostFacts {
        cgroups: Hierarchy::V2 { mount: "/sys/fs/cgroup".into() },
        group: "harvest-0".into(),
        resolv_conf: "nameserver 192.0.2.1\n".into(),
        ids: Ids::Own,
        redirect: Redirect::Nftables,
    }
}

fn planned(network: Network) -> Plan {
    plan(&record(network), &["/l/base".into(), "/l/repo".into()], &facts())
}

fn at(plan: &Plan, wanted: impl Fn(&Step) -> bool) -> usize {
    plan.steps.iter().position(wanted).unwrap()
}

#[test]
fn pid_1_mounts_nothing_after_the_hosts_powers_are_gone() {
    let plan = planned(Network::Door);
    let names: Vec<String> = plan
        .parts()
        .own
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
fn nothing_that_tells_sandboxes_apart_is_done_before_the_gate() {
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
        let text = serde_json::to_string(&(parts.ahead, parts.own)).unwrap();
        text.replace(plan.sandbox.part(), "")
    });
    assert_eq!(before[0], before[1]);
}

#[test]
fn the_supervisor_hears_whose_it_is_when_nobody_inside_has_the_hosts_powers() {
    let plan = planned(Network::Door);
    let called = plan.parts().called;
    assert!(
        called.ends_with(&[Step::Settle, Step::Root, Step::EnterUserNamespace, Step::Launch]),
        "{called:?}"
    );
}

#[test]
fn only_the_hosts_network_leaves_out_the_net_namespace_and_the_loopback() {
    let has = |network, wanted: fn(&Step) -> bool| planned(network).steps.iter().any(wanted);
    let loopback: fn(&Step) -> bool = |step| matches!(step, Step::Loopback { .. });
    let net: fn(&Step) -> bool = |step| matches!(step, Step::Clone { namespaces, .. } if namespaces.contains(&Namespace::Net));
    assert!(has(Network::Door, loopback) && has(Network::Door, net));
    assert!(!has(Network::Host, loopback) && !has(Network::Host, net));
}

#[test]
fn without_root_ids_are_shared_and_no_cgroup_is_needed() {
    let facts = HostFacts { cgroups: Hierarchy::None, ids: Ids::Shared, ..facts() };
    let plan = plan(&record(Network::Door), &["/l/base".into()], &facts);
    let pids = Limits::default().pids;
    assert_eq!(plan.steps[0], Step::ShareIds { count: IDS, processes: pids });
    assert!(
        !plan.steps.iter().any(|step| matches!(step, Step::MakeGroup(_) | Step::ClaimIds { .. }))
    );
}

#[test]
fn a_plan_says_how_this_host_redirects() {
    let facts = HostFacts { redirect: Redirect::Iptables, ..facts() };
    let plan = plan(&record(Network::Door), &[], &facts);
    assert!(plan.to_string().contains("redirect=\"iptables\""), "{plan}");
}

#[test]
fn the_topmost_layer_comes_first_in_the_overlay() {
    let plan = planned(Network::Door);
    assert!(plan.steps.contains(&Step::Overlay { lowers: vec!["1".into(), "0".into()] }));
}

#[test]
fn volumes_come_after_everything_they_could_be_hidden_by_and_before_the_root_is_entered() {
    let plan = planned(Network::Door);
    let volume = at(&plan, |step| matches!(step, Step::Volume { .. }));
    assert!(at(&plan, |step| matches!(step, Step::Bind { .. })) < volume);
    assert!(volume < at(&plan, |step| *step == Step::Root));
    let Step::Volume { from, .. } = &plan.steps[volume] else { unreachable!() };
    assert_eq!(from.number, 3, "two layers and a bind come before it");
}

#[test]
fn a_plan_prints_one_line_per_step_and_survives_json() {
    let plan = planned(Network::Door);
    assert_eq!(plan.to_string().lines().count(), plan.steps.len() + 1);
    assert!(plan.to_string().contains("capabilities keep=[\"chown\""));
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
}
