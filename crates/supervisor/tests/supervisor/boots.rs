//! From a first word to an agent that takes prompts.

use super::*;

#[test]
fn a_fresh_boot_clones_runs_the_hooks_and_carries_prompts_out_once() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    let setup = "echo $GREETING > $HOME/setup; id -u >> $HOME/setup; pwd >> $HOME/setup";
    let hooks = [
        (".harvest/setup.sh", setup),
        (".harvest/start.sh", "sleep 98765 & echo $! > $HOME/service"),
    ];
    let boot = sandbox.boot(BootStart::Fresh, &hooks);
    for _ in 0..2 {
        let boot = Box::new(boot.clone());
        assert_eq!(owner.ask(|id| ToSupervisor::Boot { id, boot }), Ok(Reply::Done));
    }
    for phase in
        [BootPhase::Starting, BootPhase::Sync, BootPhase::Setup, BootPhase::Start, BootPhase::Agent]
    {
        owner.phase(phase, PhaseStatus::Started);
        owner.phase(phase, PhaseStatus::Done);
    }
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    let checkout = sandbox.at("workspace/shop");
    let setup = fs::read_to_string(sandbox.at("home/setup")).unwrap();
    assert_eq!(setup, format!("hi\n10001\n{}\n", checkout.display()));
    let head = fs::read_to_string(checkout.join(".git/HEAD")).unwrap();
    assert_eq!(head, "ref: refs/heads/harvest/work\n");

    let order = order("say hello");
    for _ in 0..2 {
        let prompt = Box::new(order.clone());
        assert_eq!(owner.ask(|id| ToSupervisor::Prompt { id, prompt }), Ok(Reply::Done));
    }
    owner.event(
        |body| matches!(body, EventBody::TurnStarted { prompt, .. } if *prompt == order.prompt),
    );
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    assert_eq!(fs::read_to_string(sandbox.at("home/author")).unwrap(), "Ada (Harvest)\n");
    assert_eq!(
        fs::read_to_string(sandbox.at("home/where")).unwrap(),
        format!("{}\n", checkout.display())
    );
    let Ok(Reply::Status(status)) = owner.ask(|id| ToSupervisor::Status { id }) else { panic!() };
    assert_eq!(status.prompts, [(order.prompt, PromptProgress::Ended)]);
    assert_eq!((status.phase, status.failed), (Some(BootPhase::Ready), false));
    let service = fs::read_to_string(sandbox.at("home/service")).unwrap();
    assert!(lives(&service), "what start.sh started stays");
    kill(&service);
}

#[test]
fn a_failing_hook_ends_the_boot_with_its_last_lines() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    let boot = sandbox.boot(
        BootStart::Fresh,
        &[(".harvest/setup.sh", "echo no such luck; echo MY_TOKEN=geheim; exit 9")],
    );
    owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    let failed = owner
        .event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
    let EventBody::BootPhase { phase, tail: Some(tail), .. } = failed else { panic!("{failed:?}") };
    assert_eq!(phase, BootPhase::Setup);
    assert!(tail.contains("no such luck") && tail.contains("code 9"), "{tail}");
    assert!(tail.contains("MY_TOKEN=***") && !tail.contains("geheim"), "{tail}");
    let refused = owner.ask(|id| ToSupervisor::Prompt { id, prompt: Box::new(order("x")) });
    assert_eq!(refused.unwrap_err().code, FaultCode::NotReady);
}

#[test]
fn a_hook_that_never_ends_is_killed_with_what_it_started() {
    let hook = "(setsid sleep 98765 & echo $! >$HOME/left); echo waiting; sleep 98765";
    // A busy machine may need longer than the limit to get as far as that; then it gets longer.
    for hook_millis in [1000, 8000, 60_000] {
        let sandbox = Sandbox::start();
        let mut owner = sandbox.owner(1, 0);
        let boot = sandbox.boot(BootStart::Fresh, &[(".harvest/start.sh", hook)]);
        let boot = Boot { hook_millis: Some(hook_millis), ..boot };
        owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
        let failed = owner
            .event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
        let EventBody::BootPhase { phase, tail: Some(tail), .. } = failed else {
            panic!("{failed:?}")
        };
        assert_eq!(phase, BootPhase::Start);
        assert!(tail.contains("time limit"), "{tail}");
        let left = fs::read_to_string(sandbox.at("home/left")).unwrap_or_default();
        if !left.is_empty() && tail.contains("waiting") {
            assert!(!lives(&left), "what it started lives on");
            return;
        }
    }
    panic!("the hook never got as far as waiting");
}

#[test]
fn an_image_boot_starts_from_the_newest_base_and_a_restore_changes_nothing() {
    let sandbox = Sandbox::start();
    let build = Boot { agent: None, ..sandbox.boot(BootStart::Build, &[]) };
    let mut owner = sandbox.owner(1, 0);
    owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(build) }).unwrap();
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    let checkout = sandbox.at("workspace/shop");
    assert_eq!(fs::read_to_string(checkout.join(".git/HEAD")).unwrap(), "ref: refs/heads/main\n");
    let work = sandbox.at("origin-work");
    fs::write(work.join("README"), "newer\n").unwrap();
    git(&work, &["commit", "-q", "-a", "-m", "second"]);
    git(&work, &["push", "-q", "origin", "HEAD:main"]);

    // The same disk under the next sandboxes.
    let next = |start| {
        let next = Sandbox::start();
        fs::remove_dir(next.at("workspace")).unwrap();
        fs::rename(sandbox.at("workspace"), next.at("workspace")).unwrap();
        let boot = Boot { agent: None, ..sandbox.boot(start, &[]) };
        let mut owner = next.owner(1, 0);
        owner.ask(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
        owner.phase(BootPhase::Ready, PhaseStatus::Done);
        let checkout = next.at("workspace/shop");
        let found = (
            fs::read_to_string(checkout.join(".git/HEAD")).unwrap(),
            fs::read_to_string(checkout.join("README")).unwrap(),
        );
        fs::write(checkout.join("README"), "work in progress\n").unwrap();
        fs::rename(next.at("workspace"), sandbox.at("workspace")).unwrap();
        found
    };
    let branch = "ref: refs/heads/harvest/work\n".to_owned();
    assert_eq!(next(BootStart::Image), (branch.clone(), "newer\n".to_owned()));
    assert_eq!(next(BootStart::Restore), (branch, "work in progress\n".to_owned()));
}
