//! What every provider keeps, as one suite that runs against each of them. It panics at the first
//! promise that is broken, so it is called from tests only.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use harvest_proto::{
    SandboxId, SnapshotId,
    bridge::{Command, Exit, Role, ToSupervisor},
    event::SnapshotKind,
};
use harvest_session::{
    bridge::Bridge,
    provider::{Found, Provider, StartFrom, StartOrder},
};

// At the top of the disk: no provider puts anything in the way of a snapshot there.
const FILE: &str = "/contract.txt";

/// Runs the whole suite with sandboxes started from `image`.
///
/// # Panics
/// When the provider breaks a promise.
pub async fn run(provider: Arc<dyn Provider>, image: &str) {
    let suite = Suite { provider, image: image.to_owned() };
    suite.a_started_sandbox_is_found_listed_and_runs_commands().await;
    suite.what_was_kept_at_the_end_is_there_after_a_restore().await;
    suite.a_running_sandbox_is_kept_and_forked().await;
    suite.what_stands_still_goes_on_after_a_thaw().await;
    suite.a_sandbox_that_dies_leaves_its_disk().await;
    suite.ending_is_idempotent_and_leaves_nothing().await;
    suite.what_is_not_there_is_an_error().await;
}

struct Suite {
    provider: Arc<dyn Provider>,
    image: String,
}

impl Suite {
    async fn start(&self, from: StartFrom) -> SandboxId {
        let sandbox = SandboxId::random();
        let order = StartOrder { sandbox: sandbox.clone(), from, state: None };
        let started = self.provider.start(order).await.expect("a sandbox starts");
        assert!(started.door.is_absolute(), "a door is named by its whole path");
        sandbox
    }

    async fn fresh(&self) -> SandboxId {
        self.start(StartFrom::Image(self.image.clone())).await
    }

    async fn dial(&self, sandbox: &SandboxId) -> Bridge {
        let stream = self.provider.dial(sandbox).await.expect("a started sandbox can be dialled");
        Bridge::open(stream, Role::Guest, None).await.expect("its supervisor says welcome").bridge
    }

    async fn write(&self, sandbox: &SandboxId, text: &str) {
        let bridge = self.dial(sandbox).await;
        let root = Some("root".to_owned());
        bridge.file_write(FILE, 0o644, root, text.as_bytes()).await.expect("a file is written");
    }

    async fn read(&self, sandbox: &SandboxId) -> String {
        let bridge = self.dial(sandbox).await;
        let bytes = bridge.file_read(FILE, 1024).await.expect("the file is there");
        String::from_utf8(bytes).expect("it holds what was written")
    }

    async fn end(&self, sandbox: &SandboxId) {
        self.provider.end(sandbox).await.expect("a sandbox ends");
    }

    async fn forget(&self, snapshot: &SnapshotId) {
        if let Some(snapshots) = self.provider.snapshots() {
            snapshots.remove(snapshot).await.expect("a snapshot is forgotten");
            snapshots.remove(snapshot).await.expect("forgetting is idempotent");
        }
    }

    async fn a_started_sandbox_is_found_listed_and_runs_commands(&self) {
        let sandbox = self.fresh().await;
        let found = self.provider.find(&sandbox).await.expect("it can be looked for");
        assert!(matches!(found, Found::Running(_)), "a started sandbox runs: {found:?}");
        let listed = self.provider.list().await.expect("sandboxes are listed");
        assert!(listed.contains(&sandbox), "a running sandbox is listed");
        let bridge = self.dial(&sandbox).await;
        let argv = ["echo", "hello"].map(str::to_owned).to_vec();
        let command = Command { argv, ..Command::default() };
        let output = bridge.run_command(command, 1024).await.expect("a command runs");
        assert_eq!((output.exit, &output.stdout[..]), (Exit::Code(0), &b"hello\n"[..]));
        self.end(&sandbox).await;
    }

    async fn what_was_kept_at_the_end_is_there_after_a_restore(&self) {
        let (first, snapshot) = (self.fresh().await, SnapshotId::random());
        self.write(&first, "kept").await;
        for _ in 0..2 {
            let kept = self.provider.end_kept(&first, &snapshot, SnapshotKind::Pause).await;
            kept.expect("ending with a snapshot is idempotent");
        }
        let found = self.provider.find(&first).await.expect("it can be looked for");
        assert_eq!(found, Found::Gone, "nothing is left of a sandbox that was kept");
        let second = self.start(StartFrom::Snapshot(snapshot.clone())).await;
        assert_eq!(self.read(&second).await, "kept");
        self.end(&second).await;
        self.forget(&snapshot).await;
    }

    async fn a_running_sandbox_is_kept_and_forked(&self) {
        let Some(snapshots) = self.provider.snapshots() else { return };
        let (source, snapshot) = (self.fresh().await, SnapshotId::random());
        self.write(&source, "before").await;
        for _ in 0..2 {
            let captured = snapshots.capture(&source, &snapshot, SnapshotKind::Turn).await;
            captured.expect("capturing is idempotent");
        }
        self.write(&source, "after").await;
        let forks = [
            self.start(StartFrom::Snapshot(snapshot.clone())).await,
            self.start(StartFrom::Snapshot(snapshot.clone())).await,
        ];
        self.write(&forks[0], "mine").await;
        assert_eq!(self.read(&forks[1]).await, "before", "forks do not see each other");
        assert_eq!(self.read(&source).await, "after", "the source goes on by itself");
        for sandbox in forks.iter().chain([&source]) {
            self.end(sandbox).await;
        }
        self.forget(&snapshot).await;
    }

    async fn what_stands_still_goes_on_after_a_thaw(&self) {
        let Some(freezing) = self.provider.freezing() else { return };
        let (sandbox, hold) = (self.fresh().await, Duration::from_secs(60));
        for _ in 0..2 {
            freezing.freeze(&sandbox, hold).await.expect("a freeze can be renewed");
        }
        // Its supervisor answers all the while.
        self.write(&sandbox, "still").await;
        let bridge = self.dial(&sandbox).await;
        let argv = ["echo", "on"].map(str::to_owned).to_vec();
        let command = bridge.run_command(Command { argv, ..Command::default() }, 1024);
        let order = Mutex::new(Vec::new());
        let note = |what| order.lock().expect("no holder of this lock panics").push(what);
        let ran = async {
            let ran = command.await.expect("a command runs");
            note("ran");
            ran
        };
        let thawed = async {
            assert_eq!(self.read(&sandbox).await, "still");
            note("thawed");
            for _ in 0..2 {
                freezing.thaw(&sandbox).await.expect("a thaw is idempotent");
            }
        };
        let (ran, ()) = tokio::join!(ran, thawed);
        assert_eq!((ran.exit, &ran.stdout[..]), (Exit::Code(0), &b"on\n"[..]));
        let order = order.into_inner().expect("no holder of this lock panics");
        assert_eq!(order, ["thawed", "ran"], "nothing runs in what stands still");
        // Whoever froze it may be dead: what nobody renews goes on by itself.
        freezing.freeze(&sandbox, Duration::from_millis(50)).await.expect("it stands still again");
        let argv = ["echo", "by itself"].map(str::to_owned).to_vec();
        let ran = bridge.run_command(Command { argv, ..Command::default() }, 1024).await;
        assert!(ran.expect("a command runs").ok(), "a freeze nobody renews ends");
        freezing.freeze(&sandbox, hold).await.expect("it stands still again");
        self.end(&sandbox).await;
        assert!(freezing.freeze(&sandbox, hold).await.is_err(), "what is gone cannot stand still");
    }

    async fn a_sandbox_that_dies_leaves_its_disk(&self) {
        let (sandbox, snapshot) = (self.fresh().await, SnapshotId::random());
        self.write(&sandbox, "left").await;
        let stream = self.provider.dial(&sandbox).await.expect("a started sandbox can be dialled");
        // Only its owner may shut it down.
        let role = Role::Owner { lease: 1, epoch: 1, stored: 0 };
        let owner =
            Bridge::open(stream, role, None).await.expect("its supervisor says welcome").bridge;
        owner.say(ToSupervisor::Shutdown { id: 1_000_000 });
        let reason = self.provider.ended(&sandbox).await.expect("its end is told");
        assert!(!reason.is_empty(), "an end has a reason");
        let found = self.provider.find(&sandbox).await.expect("it can be looked for");
        assert!(matches!(found, Found::Dead { .. }), "a dead sandbox is found dead: {found:?}");
        assert!(self.provider.dial(&sandbox).await.is_err(), "the dead do not answer");
        let kept = self.provider.end_kept(&sandbox, &snapshot, SnapshotKind::Recovered).await;
        kept.expect("what a dead sandbox left is kept");
        let next = self.start(StartFrom::Snapshot(snapshot.clone())).await;
        assert_eq!(self.read(&next).await, "left");
        self.end(&next).await;
        self.forget(&snapshot).await;
    }

    async fn ending_is_idempotent_and_leaves_nothing(&self) {
        let sandbox = self.fresh().await;
        self.end(&sandbox).await;
        self.end(&sandbox).await;
        self.end(&SandboxId::random()).await;
        assert_eq!(self.provider.find(&sandbox).await.expect("it can be looked for"), Found::Gone);
        let listed = self.provider.list().await.expect("sandboxes are listed");
        assert!(!listed.contains(&sandbox), "an ended sandbox is not listed");
    }

    async fn what_is_not_there_is_an_error(&self) {
        let order = |from| StartOrder { sandbox: SandboxId::random(), from, state: None };
        let missing = StartFrom::Snapshot(SnapshotId::random());
        assert!(
            !self.provider.holds(&missing).await.expect("it can be looked for"),
            "nobody took it"
        );
        assert!(self.provider.start(order(missing)).await.is_err(), "a snapshot nobody took");
        for (name, there) in [(self.image.as_str(), true), ("no-such-image", false)] {
            let held = self.provider.holds(&StartFrom::Image(name.to_owned())).await;
            assert_eq!(held.expect("it can be looked for"), there, "{name}");
        }
        let (nobody, snapshot) = (SandboxId::random(), SnapshotId::random());
        let kept = self.provider.end_kept(&nobody, &snapshot, SnapshotKind::Pause).await;
        assert!(kept.is_err(), "what is not there cannot be kept");
        assert!(self.provider.dial(&nobody).await.is_err(), "nobody answers for nobody");
    }
}
