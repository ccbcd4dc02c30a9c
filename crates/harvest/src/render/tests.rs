//! Renders streams of events and compares the text.

use super::*;
use harvest_proto::{
    PromptId, SandboxId, SnapshotId,
    bridge::Exit,
    event::{
        BootFailure, CheckoutSync, CommittedWork, McpServer, SavedWork, SnapshotKind, StartWay,
        SyncOutcome, ToolKind,
    },
};
use serde_json::{Value, json};

fn shown(bodies: Vec<EventBody>) -> String {
    shown_by(Renderer::new(false, 100, Palette::default()), bodies)
}

fn shown_by(mut renderer: Renderer, bodies: Vec<EventBody>) -> String {
    let mut screen = String::new();
    for (number, body) in bodies.into_iter().enumerate() {
        let seq = number as u64 + 1;
        let event =
            Event { seq, at: Timestamp::from_millis(seq.cast_signed() * 250), turn: None, body };
        for piece in renderer.event(&event) {
            match piece {
                Piece::Text(text) => screen += &text,
                Piece::Line(line) => screen += &(line + "\n"),
            }
        }
    }
    if let Some(Piece::Text(text)) = renderer.finish() {
        screen += &text;
    }
    screen
}

fn phase(phase: BootPhase, status: PhaseStatus, millis: u64) -> EventBody {
    EventBody::BootPhase { phase, status, millis: Some(millis), tail: None, failure: None }
}

fn started(call: &str, name: &str, input: Value) -> EventBody {
    let kind = match name {
        "Bash" => ToolKind::Execute,
        "Read" => ToolKind::Read,
        "Edit" | "Write" => ToolKind::Edit,
        _ => ToolKind::Other,
    };
    let (call, name) = (call.into(), name.into());
    EventBody::ToolStarted { call, name, kind, input, parent: None, blob: None }
}

fn ended(call: &str, ok: bool, output: &str) -> EventBody {
    EventBody::ToolEnded { call: call.into(), ok, output: output.into(), blob: None }
}

fn opened(repository: &str, number: u64, url: &str) -> EventBody {
    EventBody::PrOpened {
        repository: repository.parse().unwrap(),
        number,
        url: url.into(),
        branch: "harvest/x".parse().unwrap(),
    }
}

fn evidence(passed: bool) -> EventBody {
    EventBody::Evidence(Evidence {
        repository: "local/calc".parse().unwrap(),
        commit: "1c9e0d4aaaaaaaaa".into(),
        check: ".harvest/check.sh".into(),
        command: ".harvest/check.sh".into(),
        base: None,
        base_commit: None,
        changed: Vec::new(),
        changed_count: 0,
        snapshot_id: None,
        outcome: if passed { CheckOutcome::Passed } else { CheckOutcome::Failed },
        exit: Exit::Code(i32::from(!passed)),
        millis: 640,
        tail: "FAILED (failures=1)".into(),
        at: Timestamp::from_millis(0),
    })
}

#[test]
fn boot_phases_are_timed_and_skipped_ones_hidden() {
    let screen = shown(vec![
        phase(BootPhase::Starting, PhaseStatus::Started, 0),
        phase(BootPhase::Starting, PhaseStatus::Done, 12),
        phase(BootPhase::Sync, PhaseStatus::Done, 380),
        phase(BootPhase::Setup, PhaseStatus::Skipped, 0),
        phase(BootPhase::Agent, PhaseStatus::Done, 1_640),
        EventBody::BootPhase {
            phase: BootPhase::Start,
            status: PhaseStatus::Failed,
            millis: Some(9),
            tail: Some("no such file".into()),
            failure: Some(BootFailure {
                message: ".harvest/start.sh failed (exit 127)".into(),
                permanent: true,
                start_over: false,
            }),
        },
    ]);
    assert_eq!(
        screen,
        "Synced the checkout in 380ms\nStarted the agent in 1.6s\n\
         .harvest/start.sh failed (exit 127)\n  | no such file\n"
    );
}

#[test]
fn sync_shows_the_commits_of_moved_checkouts() {
    let checkout = |repository: &str, before: Option<&str>, after: &str| SyncedCheckout {
        repository: repository.parse().unwrap(),
        before: before.map(str::to_owned),
        after: Some(after.to_owned()),
        base: None,
    };
    let synced = |checkouts| vec![EventBody::Synced { checkouts, millis: 380 }];
    let moved = checkout("acme/shop", Some("1111111111"), "2222222222");
    let same = checkout("acme/lib", Some("3333333333"), "3333333333");
    let cloned = checkout("acme/new", None, "4444444444");
    let screen = shown(synced(vec![moved, same.clone(), cloned.clone()]));
    assert_eq!(screen, "Updated acme/shop: 1111111 → 2222222\n");
    assert_eq!(shown(synced(vec![same.clone()])), "");
    let verbose = Renderer::new(true, 80, Palette::default());
    assert_eq!(
        shown_by(verbose, synced(vec![same, cloned])),
        "Synced acme/lib: at 3333333\nSynced acme/new: at 4444444\n"
    );
}

#[test]
fn turn_shows_text_and_one_line_per_tool() {
    let prompt = PromptId::random();
    let screen = shown(vec![
        EventBody::TurnStarted { prompt: prompt.clone(), number: 1 },
        EventBody::TextDelta { text: "I look at ".into() },
        EventBody::TextDelta { text: "the test.".into() },
        started("a", "Read", json!({"file_path": "calc.py"})),
        started("b", "Bash", json!({"command": "python3 -m unittest\necho done"})),
        ended("a", true, "def add(a, b):\n\n"),
        ended("b", false, "FAILED (failures=1)\n"),
        EventBody::TurnEnded {
            prompt,
            outcome: TurnOutcome::Completed,
            reason: None,
            error: None,
            millis: 126_000,
        },
    ]);
    assert_eq!(
        screen,
        "● turn 1\nI look at the test.\n  ✓ Read calc.py (500ms) → 2 lines\n\
         \x20 ✗ Bash python3 -m unittest (500ms) → FAILED (failures=1)\nCompleted turn 1 in 2m06s\n"
    );
}

#[test]
fn long_lines_are_truncated_to_the_width() {
    let bodies = vec![
        started("a", "Bash", json!({"command": "x".repeat(200)})),
        ended("a", true, &"y".repeat(200)),
        EventBody::PromptQueued {
            prompt: PromptId::random(),
            text: "z".repeat(200),
            author: String::new(),
            attachments: Vec::new(),
        },
    ];
    let screen = shown(bodies);
    assert!(screen.lines().all(|line| line.chars().count() <= 100), "{screen}");
    assert_eq!(screen.lines().count(), 3, "{screen}");
}

#[test]
fn untrusted_text_cannot_control_the_terminal() {
    let nasty = "\x1b]0;t\x07\x1b[2J\u{9b}31m\rx\u{202e}";
    let prompt = PromptId::random();
    let screen = shown(vec![
        EventBody::TextDelta { text: nasty.into() },
        started("a", nasty, json!({ "command": nasty })),
        ended("a", true, nasty),
        EventBody::Warning { message: format!("{nasty}\nCheck passed on 1c9e0d4") },
        EventBody::RequestOpened {
            request: nasty.into(),
            question: nasty.into(),
            options: vec![nasty.into()],
        },
        EventBody::PushRefused { repository: "local/calc".parse().unwrap(), reason: nasty.into() },
        EventBody::TurnEnded {
            prompt,
            outcome: TurnOutcome::Failed,
            reason: None,
            error: Some(nasty.into()),
            millis: 1,
        },
    ]);
    assert_eq!(screen, sanitize(&screen));
    assert!(!screen.lines().any(|line| line.starts_with("Check passed")), "{screen}");
}

#[test]
fn blocked_agent_says_what_it_needs() {
    let screen = shown(vec![EventBody::Blocked {
        criterion: "publish the package".into(),
        error: "403 from the registry".into(),
        attempts: vec!["npm publish".into()],
        checkpoint: None,
        needed_action: "grant the token write access".into(),
    }]);
    let expected = "Blocked: publish the package\n  because: 403 from the registry\n  \
                    tried:   npm publish\n  needed:  grant the token write access\n";
    assert_eq!(screen, expected);
}

#[test]
fn sync_names_conflict_checkpoint_and_next_command() {
    let conflict = CheckoutSync {
        repository: "acme/shop".parse().unwrap(),
        outcome: SyncOutcome::Conflict,
        branch: Some("harvest/x".into()),
        upstream: Some("origin/main".into()),
        before: Some("1111111111".into()),
        after: Some("1111111111".into()),
        base: None,
        work: CommittedWork {
            snapshot: Some("1111111111".into()),
            files: 2,
            left_out: vec!["dump".into()],
            ignored: Vec::new(),
        },
        checkpoint: Some("checkpoint-harvest-x-17".into()),
        conflicts: vec!["a.py".into(), "b.py".into()],
        commit: Some("1111111 wip: snapshot".into()),
        error: None,
        next: Some("git rebase origin/main".into()),
    };
    let rebased = CheckoutSync {
        repository: "acme/lib".parse().unwrap(),
        outcome: SyncOutcome::Rebased,
        after: Some("2222222222".into()),
        work: CommittedWork::default(),
        checkpoint: None,
        conflicts: Vec::new(),
        commit: None,
        next: None,
        ..conflict.clone()
    };
    let screen =
        shown(vec![EventBody::SyncEnded { checkouts: vec![conflict, rebased], millis: 9 }]);
    assert_eq!(
        screen,
        "Conflict: acme/shop with origin/main; the branch is as before\n  \
         committed:  2 uncommitted files as 1111111\n  left out:   dump\n  \
         files:      a.py, b.py\n  commit:     1111111 wip: snapshot\n  \
         checkpoint: checkpoint-harvest-x-17\n  next:       git rebase origin/main\n\
         Rebased acme/lib onto origin/main: 1111111 → 2222222\n"
    );
}

#[test]
fn saved_work_is_counted_and_its_error_named() {
    let work = CommittedWork {
        snapshot: Some("3333333333".into()),
        files: 1,
        left_out: vec!["dump".into()],
        ignored: Vec::new(),
    };
    let saved = SavedWork {
        repository: "acme/shop".parse().unwrap(),
        work,
        pushed: None,
        error: Some("git push: closed".into()),
    };
    assert_eq!(
        shown(vec![EventBody::WorkSaved(saved)]),
        "Saved 1 uncommitted file as 3333333 in acme/shop\nLeft out in acme/shop: dump\n\
         warning: acme/shop: git push: closed\n"
    );
}

#[test]
fn later_push_updates_the_pull_request() {
    let pull_request = || opened("local/calc", 1, "u");
    assert_eq!(
        shown(vec![pull_request(), pull_request()]),
        "Opened pull request #1  u\nUpdated pull request #1  u\n"
    );
}

#[test]
fn missing_and_merged_pull_requests_are_shown() {
    let repository = || "local/calc".parse().unwrap();
    let (number, url) = (3, "http://h/3".into());
    let screen = shown(vec![
        EventBody::PrSkipped {
            repository: repository(),
            reason: "no pull request was opened: it is suspended".into(),
            hint: Some("an owner ends it".into()),
        },
        EventBody::PrChanged {
            repository: repository(),
            number,
            url,
            state: harvest_proto::api::PullRequestState::Merged,
        },
    ]);
    assert_eq!(
        screen,
        "Pull request of local/calc: no pull request was opened: it is suspended\n  \
         hint: an owner ends it\nPull request #3 is merged\n"
    );
}

#[test]
fn lines_name_one_of_several_repositories() {
    let renderer =
        Renderer { many_repositories: true, ..Renderer::new(false, 100, Palette::default()) };
    let screen = shown_by(
        renderer,
        vec![opened("local/calc", 1, "u"), opened("local/lib", 1, "v"), evidence(true)],
    );
    assert_eq!(
        screen,
        "Opened pull request #1 of local/calc  u\nOpened pull request #1 of local/lib  v\n\
         Check passed on 1c9e0d4 of local/calc in a fresh sandbox: .harvest/check.sh (640ms)\n"
    );
}

#[test]
fn full_tool_output_is_shown_on_request() {
    let mut renderer = Renderer::new(false, 30, Palette::default());
    renderer.full = true;
    let output = ["x".repeat(40), "y".into()].join("\n\n");
    let bodies = vec![started("a", "Bash", json!({"command": "go"})), ended("a", true, &output)];
    let screen = shown_by(renderer, bodies);
    assert_eq!(screen, format!("  ✓ Bash go (250ms)\n  | {}\n  | \n  | y\n", "x".repeat(40)));
}

#[test]
fn push_pull_request_and_checks_are_shown() {
    let screen = shown(vec![
        EventBody::Pushed {
            repository: "local/calc".parse().unwrap(),
            branch: "harvest/x".parse().unwrap(),
            commit: "1c9e0d4aaaaaaaaa".into(),
        },
        opened("local/calc", 3, "http://h/3"),
        evidence(true),
        evidence(false),
    ]);
    assert_eq!(
        screen,
        "Pushed harvest/x at 1c9e0d4 to local/calc\nOpened pull request #3  http://h/3\n\
         Check passed on 1c9e0d4 in a fresh sandbox: .harvest/check.sh (640ms)\n\
         Check failed on 1c9e0d4 in a fresh sandbox: .harvest/check.sh (exit 1, 640ms)\n  | FAILED (failures=1)\n"
    );
}

#[test]
fn internal_events_print_nothing() {
    let idle = EventBody::StateChanged {
        state: SessionState::Idle,
        reason: StateReason::Ready,
        detail: None,
    };
    assert_eq!(shown(vec![idle, EventBody::AgentRaw { line: "{}".into() }]), "");
}

#[test]
fn unfinished_text_ends_with_newline() {
    assert_eq!(shown(vec![EventBody::TextDelta { text: "half a".into() }]), "half a\n");
}

#[test]
fn truncation_respects_character_boundaries() {
    assert_eq!(truncate("äöü", 2), "äö…");
    assert_eq!(truncate("äö", 2), "äö");
    assert_eq!(short_commit("äö"), "äö");
}

#[test]
fn sandbox_start_is_shown_and_snapshot_only_verbose() {
    let (sandbox, snapshot) = (SandboxId::random(), SnapshotId::random());
    let bodies = vec![
        EventBody::SandboxStarted {
            sandbox: sandbox.clone(),
            epoch: 1,
            from: "calc".into(),
            way: StartWay::Image,
            millis: 4,
        },
        EventBody::SnapshotTaken {
            snapshot_id: snapshot.clone(),
            kind: SnapshotKind::Turn,
            millis: 3,
        },
    ];
    let started = format!("Started {sandbox} from calc in 4ms\n");
    assert_eq!(shown(bodies.clone()), started);
    let verbose = shown_by(Renderer::new(true, 100, Palette::default()), bodies);
    assert_eq!(verbose, format!("{started}Saved snapshot {snapshot} of the turn (3ms)\n"));
}

#[test]
fn only_first_words_of_a_line_are_styled() {
    let colored = Palette::new(true, None);
    let renderer = || Renderer::new(false, 100, colored);
    assert_eq!(
        shown_by(renderer(), vec![evidence(false)]),
        "\x1b[31mCheck failed\x1b[0m on 1c9e0d4 in a fresh sandbox: .harvest/check.sh \
         (exit 1, 640ms)\n  | FAILED (failures=1)\n"
    );
    let nasty = EventBody::Warning { message: "\x1b[32mCheck passed\x1b[0m\nwarning: x".into() };
    assert_eq!(
        shown_by(renderer(), vec![nasty]),
        "\x1b[33mwarning:\x1b[0m Check passed\n    warning: x\n"
    );
}

#[test]
fn newest_running_tool_is_the_activity() {
    let mut renderer = Renderer::new(false, 100, Palette::default());
    let mut activity = |seq: u64, body| {
        let at = Timestamp::from_millis(seq.cast_signed());
        renderer.event(&Event { seq, at, turn: None, body });
        let activity = renderer.activity()?;
        Some((activity.what, activity.since?.as_millis()))
    };
    activity(1, EventBody::TurnStarted { prompt: PromptId::random(), number: 1 });
    assert_eq!(activity(2, EventBody::TextDelta { text: "I".into() }), None);
    let tests = activity(3, started("a", "Bash", json!({"command": "pytest -q"})));
    assert_eq!(tests, Some(("Bash pytest -q".into(), 3)));
    let output =
        EventBody::ToolOutput { call: "a".into(), text: "\x1b[1mtest_add\nok \n\n".into() };
    assert_eq!(activity(3, output), Some(("Bash pytest -q → ok ".into(), 3)));
    let read = activity(4, started("b", "Read", json!({"file_path": "calc.py"})));
    assert_eq!(read, Some(("Read calc.py (and 1 more)".into(), 4)));
    assert_eq!(activity(5, ended("b", true, "")), Some(("Bash pytest -q → ok ".into(), 3)));
    assert_eq!(activity(6, ended("a", true, "")), Some(("Working".into(), 6)));
}

#[test]
fn plan_and_failed_servers_are_shown() {
    let step = |text: &str, status| PlanStep { text: text.into(), status };
    let steps = vec![step("read", StepStatus::Completed), step("fix", StepStatus::InProgress)];
    let server = |name: &str, state| McpServer { name: name.into(), state };
    let mcp = vec![server("memory", McpState::Connected), server("web", McpState::Failed)];
    let screen = shown(vec![
        EventBody::AgentReady { version: Some("1".into()), model: None, mcp },
        EventBody::Plan { steps },
        EventBody::Title { title: "Fix it".into() },
    ]);
    assert_eq!(screen, "warning: MCP server web failed\nPlan, 1 of 2 done: fix\n");
}

#[test]
fn streamed_markdown_is_rendered_line_by_line() {
    let mut renderer = Renderer::new(false, 40, Palette::default());
    renderer.render_markdown(Palette::new(true, None));
    let mut text = |text: &str| {
        let body = EventBody::TextDelta { text: text.into() };
        let pieces =
            renderer.event(&Event { seq: 1, at: Timestamp::from_millis(0), turn: None, body });
        (pieces, renderer.activity().map(|activity| activity.what))
    };
    assert_eq!(text("I fixed **it"), (vec![], Some("I fixed **it".into())));
    let line = Piece::Text("I fixed \x1b[1mit\x1b[0m.\n".into());
    assert_eq!(text("**.\nNext"), (vec![line], Some("Next".into())));
    assert_eq!(text(&"x".repeat(50)).1, Some("x".repeat(28)));
    assert_eq!(renderer.finish(), Some(Piece::Text(format!("Next{}\n", "x".repeat(50)))));
    assert_eq!(renderer.finish(), None);
}

#[test]
fn follower_that_joins_late_invents_no_numbers() {
    let end = || EventBody::TurnEnded {
        prompt: PromptId::random(),
        outcome: TurnOutcome::Stopped,
        reason: None,
        error: None,
        millis: 2_000,
    };
    assert_eq!(
        shown(vec![ended("a", true, "done"), end()]),
        "  ✓ A tool → done\nStopped the turn in 2.0s\n"
    );
    let mut renderer = Renderer::new(false, 100, Palette::default());
    let earlier = [
        EventBody::TurnStarted { prompt: PromptId::random(), number: 4 },
        EventBody::TextDelta { text: "I wait".into() },
        started("a", "Bash", json!({"command": "sleep 60"})),
    ];
    for body in earlier {
        renderer.skip(&Event { seq: 1, at: Timestamp::from_millis(0), turn: None, body });
    }
    assert_eq!(
        shown_by(renderer, vec![ended("a", false, "(signal 9)"), end()]),
        "  ✗ Bash sleep 60 (250ms) → signal 9\nStopped turn 4 in 2.0s\n"
    );
}

#[test]
fn answer_is_not_shown_as_queued() {
    let prompt = |text: &str| EventBody::PromptQueued {
        prompt: PromptId::random(),
        text: text.into(),
        author: String::new(),
        attachments: Vec::new(),
    };
    let screen = shown(vec![
        EventBody::RequestOpened {
            request: "r".into(),
            question: "Tabs or spaces?".into(),
            options: vec!["tabs".into(), "spaces".into()],
        },
        prompt("spaces"),
        EventBody::RequestClosed { request: "r".into(), answer: Some("spaces".into()) },
        prompt("Go on."),
    ]);
    assert_eq!(
        screen,
        "? Tabs or spaces?\n  1. tabs\n  2. spaces\nAnswered “spaces”\nQueued “Go on.”\n"
    );
}

#[test]
fn open_question_keeps_the_last_line() {
    let mut renderer = Renderer::new(false, 100, Palette::default());
    let mut activity_after = |body| {
        renderer.skip(&Event { seq: 1, at: Timestamp::from_millis(1), turn: None, body });
        renderer.activity()
    };
    let request = || "r".to_owned();
    let asked = EventBody::RequestOpened {
        request: request(),
        question: "Tabs or spaces?".into(),
        options: vec![],
    };
    for body in [
        asked,
        EventBody::ThoughtDelta { text: "Hm.".into() },
        started("1", "Bash", json!({ "command": "ls" })),
        ended("1", true, ""),
        EventBody::StateChanged {
            state: SessionState::Queued,
            reason: StateReason::Turn,
            detail: None,
        },
    ] {
        assert_eq!(activity_after(body), None, "the last line is the user's");
    }
    let closed = EventBody::RequestClosed { request: request(), answer: None };
    assert_eq!(activity_after(closed).unwrap().what, "Working");
}
