//! Boots: checkouts, hooks and the start of the agent.

use super::*;

#[test]
fn fresh_boot_clones_and_runs_hooks_and_prompts() {
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
        assert_eq!(owner.request(|id| ToSupervisor::Boot { id, boot }), Ok(Reply::Done));
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

    let request = turn_request("say hello");
    for _ in 0..2 {
        let prompt = Box::new(request.clone());
        assert_eq!(owner.request(|id| ToSupervisor::Prompt { id, prompt }), Ok(Reply::Done));
    }
    owner.event(
        |body| matches!(body, EventBody::TurnStarted { prompt, .. } if *prompt == request.prompt),
    );
    assert_eq!(owner.turn_ended(), TurnOutcome::Completed);
    assert_eq!(fs::read_to_string(sandbox.at("home/author")).unwrap(), "Ada (Harvest)\n");
    assert_eq!(
        fs::read_to_string(sandbox.at("home/where")).unwrap(),
        format!("{}\n", checkout.display())
    );
    let Ok(Reply::Status(status)) = owner.request(|id| ToSupervisor::Status { id }) else {
        panic!()
    };
    assert_eq!(status.prompts, [(request.prompt, PromptProgress::Ended)]);
    assert_eq!((status.phase, status.failed), (Some(BootPhase::Ready), false));
    let service = fs::read_to_string(sandbox.at("home/service")).unwrap();
    assert!(is_alive(&service), "services of start.sh keep running");
    kill(&service);
}

#[test]
fn failing_hook_fails_the_boot_with_its_output() {
    let sandbox = Sandbox::start();
    let mut owner = sandbox.owner(1, 0);
    let boot = sandbox.boot(
        BootStart::Fresh,
        &[(".harvest/setup.sh", "echo no such luck; echo MY_TOKEN=geheim; exit 9")],
    );
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    let failed = owner
        .event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
    let EventBody::BootPhase { phase, tail: Some(tail), failure: Some(failure), .. } = failed
    else {
        panic!("{failed:?}")
    };
    assert_eq!(phase, BootPhase::Setup);
    assert_eq!(failure.message, ".harvest/setup.sh failed (exit 9)");
    assert!(failure.permanent);
    assert!(tail.contains("no such luck"), "{tail}");
    assert!(tail.contains("MY_TOKEN=***") && !tail.contains("geheim"), "{tail}");
    let refused =
        owner.request(|id| ToSupervisor::Prompt { id, prompt: Box::new(turn_request("x")) });
    assert_eq!(refused.unwrap_err().code, FaultCode::NotReady);
}

#[test]
fn hook_timeout_kills_it_and_its_descendants() {
    let hook = "(setsid sleep 98765 & echo $! >$HOME/left); echo waiting; sleep 98765";
    // A busy machine may not get that far within the timeout; then it is retried with a longer one.
    for hook_millis in [1000, 8000, 60_000] {
        let sandbox = Sandbox::start();
        let mut owner = sandbox.owner(1, 0);
        let boot = sandbox.boot(BootStart::Fresh, &[(".harvest/start.sh", hook)]);
        let boot = Boot { hook_millis: Some(hook_millis), ..boot };
        owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
        let failed = owner
            .event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
        let EventBody::BootPhase { phase, tail, failure: Some(failure), .. } = failed else {
            panic!("{failed:?}")
        };
        let tail = tail.unwrap_or_default();
        assert_eq!(phase, BootPhase::Start);
        assert_eq!(failure.message, ".harvest/start.sh failed (killed by the time limit)");
        let left = fs::read_to_string(sandbox.at("home/left")).unwrap_or_default();
        if !left.is_empty() && tail.contains("waiting") {
            assert!(!is_alive(&left), "its descendant is still alive");
            return;
        }
    }
    panic!("the hook never printed `waiting`");
}

#[test]
fn phase_without_work_is_never_started() {
    let sandbox = Sandbox::start();
    let boot = Boot { agent: None, ..sandbox.boot(BootStart::Build, &[]) };
    let mut owner = sandbox.owner(1, 0);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
    for phase in [BootPhase::Setup, BootPhase::Start, BootPhase::Agent] {
        let status = |body: &EventBody| match body {
            EventBody::BootPhase { phase: reported, status, .. } if *reported == phase => {
                Some(*status)
            }
            _ => None,
        };
        let first = owner.event(|body| status(body).is_some());
        assert_eq!(status(&first), Some(PhaseStatus::Skipped), "{phase:?}");
    }
}

#[test]
fn restore_keeps_work_that_image_boot_resets() {
    let sandbox = Sandbox::start();
    let build = Boot { agent: None, ..sandbox.boot(BootStart::Build, &[]) };
    let mut owner = sandbox.owner(1, 0);
    owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(build) }).unwrap();
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    let checkout = sandbox.at("workspace/shop");
    assert_eq!(fs::read_to_string(checkout.join(".git/HEAD")).unwrap(), "ref: refs/heads/main\n");
    let work = sandbox.at("origin-work");
    fs::write(work.join("README"), "newer\n").unwrap();
    git(&work, &["commit", "-q", "-a", "-m", "second"]);
    git(&work, &["push", "-q", "origin", "HEAD:main"]);

    // Further sandboxes on the same disk.
    let next = |start| {
        let next = Sandbox::start();
        fs::remove_dir(next.at("workspace")).unwrap();
        fs::rename(sandbox.at("workspace"), next.at("workspace")).unwrap();
        let boot = Boot { agent: None, ..sandbox.boot(start, &[]) };
        let mut owner = next.owner(1, 0);
        owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
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
