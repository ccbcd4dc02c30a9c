//! Syncs that run beside the agent. A `git` in front of the real one holds each fetch until the
//! test lets it go.

use std::{fs, os::unix::fs::PermissionsExt};

use harvest_proto::{
    AgentName, EventBody, TurnReason,
    bridge::*,
    event::{BootPhase, PhaseStatus, SyncedCheckout, TurnOutcome},
};

use crate::harness::*;

const GIT: &str = r#"#!/bin/sh
echo "$*" >>"$HOME/git-calls"
case "$1" in fetch)
    echo $$ >"$HOME/fetching"
    while [ -e "$HOME/hold-fetch" ]; do sleep 0.02; done
    if [ -e "$HOME/refuse-fetch" ]; then cat "$HOME/refuse-fetch" >&2; exit 128; fi
esac
exec /usr/bin/git "$@"
"#;

/// A sandbox on the disk of a build, whose fetch waits, and the origin of that build.
pub(crate) struct Slow {
    pub(crate) sandbox: Sandbox,
    origin: Sandbox,
    pub(crate) owner: Client,
}

impl Slow {
    pub(crate) fn built(files: &[(&str, &str)]) -> (Sandbox, Boot) {
        let origin = Sandbox::start();
        let boot = origin.boot(BootStart::Build, files);
        let build = Boot { agent: None, ..boot.clone() };
        let mut owner = origin.owner(1, 0);
        owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(build) }).unwrap();
        owner.phase(BootPhase::Ready, PhaseStatus::Done);
        (origin, boot)
    }

    pub(crate) fn boot(origin: Sandbox, boot: Boot) -> Self {
        let sandbox = Sandbox::start();
        fs::remove_dir(sandbox.at("workspace")).unwrap();
        fs::rename(origin.at("workspace"), sandbox.at("workspace")).unwrap();
        fs::write(sandbox.at("bin/git"), GIT).unwrap();
        fs::set_permissions(sandbox.at("bin/git"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(sandbox.at("home/hold-fetch"), "").unwrap();
        let mut owner = sandbox.owner(1, 0);
        owner.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).unwrap();
        Self { sandbox, origin, owner }
    }

    /// A session from a build whose base has moved since; the agent is ready, the fetch waits.
    fn start(agent: AgentName) -> Self {
        let (origin, mut boot) = Self::built(&[]);
        origin.commit("README", "newer\n");
        boot.start = BootStart::Image;
        boot.agent.as_mut().unwrap().name = agent;
        let mut slow = Self::boot(origin, boot);
        slow.owner.phase(BootPhase::Ready, PhaseStatus::Done);
        wait_until("git fetches", || slow.sandbox.at("home/fetching").exists());
        slow
    }

    pub(crate) fn release(&self) {
        fs::remove_file(self.sandbox.at("home/hold-fetch")).unwrap();
    }

    fn refuse(&self, why: &str) {
        fs::write(self.sandbox.at("home/refuse-fetch"), why).unwrap();
        self.release();
    }

    fn readme(&self) -> String {
        self.sandbox.at("workspace/shop/README").display().to_string()
    }

    /// Reads the file, then runs the command.
    fn read_then(&mut self, command: &str) {
        let script = serde_json::json!([{ "read": self.readme() }, { "bash": command }]);
        self.owner.prompt(&format!("script: {script}"));
    }

    fn tool_ended(&mut self) -> (bool, String) {
        let ended = self.owner.event(|body| matches!(body, EventBody::ToolEnded { .. }));
        let EventBody::ToolEnded { ok, output, .. } = ended else { unreachable!() };
        (ok, output)
    }

    fn warning(&mut self) -> String {
        let warning = self.owner.event(|body| matches!(body, EventBody::Warning { .. }));
        let EventBody::Warning { message } = warning else { unreachable!() };
        message
    }

    fn turn_end(&mut self) -> (TurnOutcome, Option<TurnReason>, String) {
        let ended = self.owner.event(|body| matches!(body, EventBody::TurnEnded { .. }));
        let EventBody::TurnEnded { outcome, reason, error, .. } = ended else { unreachable!() };
        (outcome, reason, error.unwrap_or_default())
    }

    /// The pid of the scripted agent.
    fn agent(&self) -> String {
        let home = format!("HOME={}\0", self.sandbox.at("home").display());
        let contains = |pid: &str, file: &str, text: &str| {
            let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            String::from_utf8_lossy(&bytes).contains(text)
        };
        let pids = fs::read_dir("/proc").unwrap();
        let mut pids = pids.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let agent = pids.find(|pid| {
            contains(pid, "cmdline", "scripted-agent") && contains(pid, "environ", &home)
        });
        agent.expect("the agent runs")
    }

    /// A reply to a request shows that everything before it was handled.
    fn nothing_has_run(&mut self) {
        assert_eq!(self.owner.sh("cat ~/ran 2>/dev/null").1, "");
        let ended = |event: &OutboxEvent| matches!(event.body, EventBody::ToolEnded { .. });
        assert!(!self.owner.events.iter().any(ended), "{:#?}", self.owner.events);
    }
}

#[test]
fn reads_run_during_fetch_and_commands_after() {
    let mut slow = Slow::start(AgentName::Scripted);
    slow.owner.prompt(r#"script: [{"tool":{"name":"Grep","input":{}}},{"bash":"cat README; git log -1 --format=%s; echo >~/ran"}]"#);
    assert!(slow.tool_ended().0, "a search runs");
    slow.owner.event(|body| matches!(body, EventBody::ToolStarted { .. }));
    slow.nothing_has_run();
    slow.release();
    // What was found may be out of date, so the model is told first.
    let (ok, output) = slow.tool_ended();
    assert!(!ok && output.contains("searches may be out of date"), "{output}");
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
    slow.owner.prompt(r#"script: [{"bash":"cat README; git branch --show-current"}]"#);
    assert_eq!(slow.tool_ended(), (true, "newer\nharvest/work\n".to_owned()));
}

#[test]
fn command_held_by_unmoved_base_just_runs() {
    for start in [BootStart::Image, BootStart::Restore] {
        let (origin, mut boot) = Slow::built(&[]);
        boot.start = start;
        boot.agent.as_mut().unwrap().name = AgentName::Scripted;
        let mut slow = Slow::boot(origin, boot);
        slow.owner.phase(BootPhase::Ready, PhaseStatus::Done);
        slow.read_then("cat README");
        assert_eq!(slow.tool_ended(), (true, "hello\n".to_owned()), "the read");
        slow.nothing_has_run();
        slow.release();
        let synced = slow.owner.event(|body| matches!(body, EventBody::Synced { .. }));
        let EventBody::Synced { checkouts, .. } = synced else { unreachable!() };
        let [SyncedCheckout { before, after, .. }] = &checkouts[..] else { panic!() };
        assert_eq!(before, after);
        assert_eq!(slow.tool_ended(), (true, "hello\n".to_owned()));
        assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
    }
}

#[test]
fn changed_file_that_was_read_is_told() {
    let mut slow = Slow::start(AgentName::Scripted);
    slow.read_then("echo >~/ran");
    assert_eq!(slow.tool_ended(), (true, "hello\n".to_owned()));
    slow.nothing_has_run();
    slow.release();
    let synced = slow.owner.event(|body| matches!(body, EventBody::Synced { .. }));
    let EventBody::Synced { checkouts, .. } = synced else { unreachable!() };
    let [SyncedCheckout { before: Some(before), after: Some(after), base, .. }] = &checkouts[..]
    else {
        panic!("{checkouts:?}")
    };
    assert!(before != after && base.as_ref() == Some(after), "{checkouts:?}");
    assert_eq!(git(&slow.origin.at("origin-work"), &["rev-parse", "HEAD"]), *after);
    let (ok, output) = slow.tool_ended();
    assert!(!ok && output.contains(&slow.readme()), "{output}");
    assert!(output.contains("acme/shop from "), "{output}");
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
    assert_eq!(slow.owner.sh("cat ~/ran 2>/dev/null").1, "");
}

#[test]
fn turn_without_tools_ends_with_the_sync() {
    let mut slow = Slow::start(AgentName::Scripted);
    slow.owner.prompt(r#"script: [{"text":"done","chunks":1}]"#);
    slow.owner.text("done");
    let Ok(Reply::Status(status)) = slow.owner.request(|id| ToSupervisor::Status { id }) else {
        panic!()
    };
    assert_eq!(status.prompts[0].1, PromptProgress::Running);
    assert_eq!(status.detached, 1, "the sandbox is not idle");
    slow.release();
    slow.owner.event(|body| matches!(body, EventBody::Synced { .. }));
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn prompt_of_other_agents_waits() {
    let mut slow = Slow::start(AgentName::Codex);
    let (_, turn) = slow.owner.prompt("say hello");
    slow.owner.event(|body| matches!(body, EventBody::TurnStarted { .. }));
    assert_eq!(slow.owner.request(|id| ToSupervisor::Stop { id, turn }), Ok(Reply::Done));
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Stopped, "while it waits");
    slow.owner.prompt("say hello");
    slow.owner.event(|body| matches!(body, EventBody::TurnStarted { .. }));
    assert!(!slow.sandbox.at("home/pid").exists(), "the agent has no prompt");
    slow.release();
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
    assert!(slow.sandbox.at("home/pid").exists());
}

#[test]
fn stop_and_crash_while_held_end_cleanly() {
    let mut slow = Slow::start(AgentName::Scripted);
    let held = r#"script: [{"bash":"echo >~/ran"}]"#;
    let (_, turn) = slow.owner.prompt(held);
    slow.owner.event(|body| matches!(body, EventBody::ToolStarted { .. }));
    assert_eq!(slow.owner.request(|id| ToSupervisor::Stop { id, turn }), Ok(Reply::Done));
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Stopped);
    // The agent that was started again asks, too.
    slow.owner.prompt(held);
    slow.owner.event(|body| matches!(body, EventBody::ToolStarted { .. }));
    kill(&slow.agent());
    slow.owner.event(|body| matches!(body, EventBody::AgentExited { .. }));
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Failed);
    slow.owner.prompt(held);
    slow.owner.event(|body| matches!(body, EventBody::ToolStarted { .. }));
    slow.nothing_has_run();
    slow.release();
    assert!(slow.tool_ended().0);
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
    assert!(slow.sandbox.at("home/ran").exists());
}

#[test]
fn unreachable_remote_leaves_a_stale_checkout() {
    let mut slow = Slow::start(AgentName::Scripted);
    slow.read_then("cat README; git branch --show-current");
    assert_eq!(slow.tool_ended(), (true, "hello\n".to_owned()));
    slow.refuse("fatal: unable to access: The requested URL returned error: 502");
    let warning = slow.warning();
    assert!(
        warning.starts_with("cannot fetch acme/shop: ") && warning.contains("502"),
        "{warning}"
    );
    assert_eq!(slow.tool_ended(), (true, "hello\nharvest/work\n".to_owned()));
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn silent_remote_is_given_up() {
    let (origin, mut boot) = Slow::built(&[]);
    boot.start = BootStart::Image;
    boot.hook_millis = Some(200);
    boot.agent.as_mut().unwrap().name = AgentName::Scripted;
    let mut slow = Slow::boot(origin, boot);
    slow.owner.phase(BootPhase::Ready, PhaseStatus::Done);
    slow.owner.prompt(r#"script: [{"bash":"cat README"}]"#);
    let warning = slow.warning();
    assert!(warning.contains("the remote did not answer in time"), "{warning}");
    assert_eq!(slow.tool_ended(), (true, "hello\n".to_owned()));
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
    let fetch = fs::read_to_string(slow.sandbox.at("home/fetching")).unwrap();
    wait_until("the fetch is dead", || !is_alive(&fetch));
}

#[test]
fn permanent_refusal_ends_the_turn() {
    for agent in [AgentName::Scripted, AgentName::Claude, AgentName::Codex] {
        let mut slow = Slow::start(agent);
        let held = "ask for tool Bash\nscript: [{\"bash\":\"echo >~/ran\"}]";
        slow.owner.prompt(held);
        slow.owner.event(|body| matches!(body, EventBody::TurnStarted { .. }));
        slow.refuse("fatal: unable to access: The requested URL returned error: 403");
        slow.owner.phase(BootPhase::Sync, PhaseStatus::Failed);
        let (outcome, reason, error) = slow.turn_end();
        assert_eq!((outcome, reason), (TurnOutcome::Failed, Some(TurnReason::SyncFailed)));
        assert!(error.contains("cannot clone or fetch acme/shop"), "{error}");
        let refused = slow
            .owner
            .request(|id| ToSupervisor::Prompt { id, prompt: Box::new(turn_request(held)) });
        assert_eq!(refused.unwrap_err().code, FaultCode::NotReady);
        slow.nothing_has_run();
    }
}

#[test]
fn moved_lockfile_and_setup_run_before_tools() {
    let setup = "echo built >>~/set-up";
    let files = [(".harvest/setup.sh", setup), ("Makefile", "install:\n\ttrue\n")];
    let (origin, mut boot) = Slow::built(&files);
    origin.commit(".harvest/setup.sh", "echo moved >>~/set-up");
    boot.start = BootStart::Image;
    boot.agent.as_mut().unwrap().name = AgentName::Scripted;
    let mut slow = Slow::boot(origin, boot);
    slow.owner.phase(BootPhase::Ready, PhaseStatus::Done);
    slow.owner.prompt(r#"script: [{"bash":"cat ~/set-up"}]"#);
    slow.release();
    assert_eq!(slow.tool_ended(), (true, "moved\n".to_owned()));
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
}

#[test]
fn start_hook_keeps_the_old_order() {
    let (origin, mut boot) = Slow::built(&[(".harvest/start.sh", "true")]);
    boot.start = BootStart::Image;
    let mut slow = Slow::boot(origin, boot);
    slow.owner.phase(BootPhase::Sync, PhaseStatus::Started);
    slow.release();
    slow.owner.phase(BootPhase::Sync, PhaseStatus::Done);
    for phase in [BootPhase::Start, BootPhase::Agent, BootPhase::Ready] {
        slow.owner.phase(phase, PhaseStatus::Done);
    }
}

#[test]
fn unmoved_base_needs_no_more_processes() {
    let (origin, mut boot) = Slow::built(&[]);
    boot.start = BootStart::Image;
    boot.repositories[0].base = Some("main".parse().unwrap());
    boot.agent.as_mut().unwrap().name = AgentName::Scripted;
    let mut slow = Slow::boot(origin, boot);
    slow.owner.phase(BootPhase::Ready, PhaseStatus::Done);
    wait_until("git fetches", || slow.sandbox.at("home/fetching").exists());
    let calls = fs::read_to_string(slow.sandbox.at("home/git-calls")).unwrap();
    // The user's settings are new in this home.
    let before = calls.lines().take_while(|call| !call.starts_with("fetch"));
    let before: Vec<_> = before.filter(|call| !call.starts_with("config")).collect();
    let [_, branch, head, ..] = before[..] else { panic!("{calls}") };
    assert!(branch.starts_with("update-ref ") && head.starts_with("symbolic-ref "), "{calls}");
    assert_eq!(before.len(), 5, "two of them run beside the agent: {calls}");
    slow.owner.prompt(r#"script: [{"text":"hi"}]"#);
    slow.release();
    assert_eq!(slow.owner.turn_ended(), TurnOutcome::Completed);
    let after = fs::read_to_string(slow.sandbox.at("home/git-calls")).unwrap();
    assert!(!after.lines().any(|call| call.contains("(Harvest)")), "{after}");
}
