//! `.harvest/config.toml` at boots.

use super::*;

const CONFIG: &str = r#"
setup = "echo $COLOR > $HOME/setup"
test = "echo tested"
ports = [3000]

[env]
COLOR = "blue"
GREETING = "not this one"
"#;

fn config_of(client: &mut Client) -> harvest_proto::api::RepositoryConfig {
    match client.event(|body| matches!(body, EventBody::RepositoryConfig { .. })) {
        EventBody::RepositoryConfig { config, .. } => *config,
        other => panic!("{other:?}"),
    }
}

#[test]
fn build_follows_file_and_later_boots_keep_env() {
    let sandbox = Sandbox::start();
    let boot = sandbox.boot(BootStart::Build, &[(".harvest/config.toml", CONFIG)]);
    let mut owner = sandbox.owner(1, 0);
    let boot = Box::new(Boot { agent: None, ..boot });
    owner.request(|id| ToSupervisor::Boot { id, boot }).unwrap();
    assert_eq!(config_of(&mut owner).ports, [3000]);
    owner.phase(BootPhase::Setup, PhaseStatus::Done);
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    assert_eq!(fs::read_to_string(sandbox.at("home/setup")).unwrap(), "blue\n");
    let kept = sandbox.at("home/.local/state/harvest/repositories/shop.test");
    assert_eq!(fs::read_to_string(kept).unwrap(), "echo tested");

    let later = Sandbox::start();
    for folder in ["workspace", "home"] {
        let _may_be_empty = fs::remove_dir_all(later.at(folder));
        fs::rename(sandbox.at(folder), later.at(folder)).unwrap();
    }
    let boot = Boot { agent: None, ..sandbox.boot(BootStart::Image, &[]) };
    let mut owner = later.owner(1, 0);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    let printed = owner.sh("echo $COLOR $GREETING").1;
    assert_eq!(printed, "blue hi\n", "the session's own variables win");
}

#[test]
fn broken_file_fails_a_build_with_its_line() {
    let sandbox = Sandbox::start();
    let files = [(".harvest/config.toml", "ports = [3000]\nsetups = \"make\"\n")];
    let boot = sandbox.boot(BootStart::Build, &files);
    let mut owner = sandbox.owner(1, 0);
    let boot = Box::new(Boot { agent: None, ..boot });
    owner.request(|id| ToSupervisor::Boot { id, boot }).unwrap();
    let failed = owner
        .event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
    let EventBody::BootPhase { tail: Some(tail), failure: Some(failure), .. } = failed else {
        panic!("{failed:?}")
    };
    assert_eq!(failure.message, ".harvest/config.toml of acme/shop cannot be used");
    assert!(failure.permanent && tail.contains("line 2"), "{tail}");
    assert!(tail.contains("`setups`") && tail.contains("`setup`"), "{tail}");
}

#[test]
fn broken_file_is_a_warning_at_cold_start() {
    let sandbox = Sandbox::start();
    let boot = sandbox.boot(BootStart::Fresh, &[(".harvest/config.toml", "ports = [0]\n")]);
    let mut owner = sandbox.owner(1, 0);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    let warned = owner.event(|body| matches!(body, EventBody::Warning { .. }));
    let EventBody::Warning { message } = warned else { panic!() };
    assert!(message.contains("line 1"), "{message}");
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
}

#[test]
fn link_in_place_of_the_file_is_refused() {
    let sandbox = Sandbox::start();
    let boot = sandbox.boot(BootStart::Build, &[("secret", "token = \"abc\"\n")]);
    let work = sandbox.at("origin-work");
    fs::create_dir_all(work.join(".harvest")).unwrap();
    std::os::unix::fs::symlink("../secret", work.join(".harvest/config.toml")).unwrap();
    git(&work, &["add", "."]);
    git(&work, &["commit", "-q", "-m", "link"]);
    git(&work, &["push", "-q", "origin", "HEAD:main"]);
    let mut owner = sandbox.owner(1, 0);
    let boot = Box::new(Boot { agent: None, ..boot });
    owner.request(|id| ToSupervisor::Boot { id, boot }).unwrap();
    let failed = owner
        .event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
    let EventBody::BootPhase { tail: Some(tail), .. } = failed else { panic!("{failed:?}") };
    assert_eq!(tail, "it is not a regular file");
}
