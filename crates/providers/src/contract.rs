//! The contract suite that every provider must pass. Panics at the first violation.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use harvest_proto::{
    SandboxId, SnapshotId,
    api::{SandboxLimits, SandboxOwner},
    bridge::{BridgeRole, Command, Exit, ToSupervisor},
    event::SnapshotKind,
};
use harvest_session::{
    bridge::Bridge,
    sandboxes::{Found, SandboxProvider, SandboxSpec, StartFrom},
};

// In the root folder, which no provider mounts over.
const FILE: &str = "/contract.txt";

/// Runs the whole suite with sandboxes started from `image`.
///
/// # Panics
/// When the provider violates the contract.
pub async fn run(provider: Arc<dyn SandboxProvider>, image: &str) {
    let suite = Suite { provider, image: image.to_owned() };
    suite.started_sandbox_is_listed_and_runs_commands().await;
    suite.usage_counts_the_work_of_commands().await;
    suite.snapshot_and_remove_preserves_files().await;
    suite.running_sandbox_is_snapshotted_and_forked().await;
    suite.frozen_sandbox_runs_after_thaw().await;
    suite.dead_sandbox_leaves_its_disk().await;
    suite.remove_is_idempotent_and_leaves_nothing().await;
    suite.missing_objects_are_errors().await;
}

struct Suite {
    provider: Arc<dyn SandboxProvider>,
    image: String,
}

impl Suite {
    async fn start(&self, from: StartFrom) -> SandboxId {
        let sandbox = SandboxId::random();
        let spec = SandboxSpec::of_session(sandbox.clone(), from, SandboxLimits::default());
        self.provider.create(spec).await.expect("a sandbox starts");
        sandbox
    }

    async fn fresh(&self) -> SandboxId {
        self.start(StartFrom::Image(self.image.clone())).await
    }

    async fn dial(&self, sandbox: &SandboxId) -> Bridge {
        let stream =
            self.provider.connect(sandbox).await.expect("a started sandbox can be dialled");
        Bridge::open(stream, BridgeRole::Client, None)
            .await
            .expect("the supervisor accepts the connection")
            .bridge
    }

    async fn write(&self, sandbox: &SandboxId, text: &str) {
        let bridge = self.dial(sandbox).await;
        let root = Some("root".to_owned());
        bridge.file_write(FILE, 0o644, root, text.as_bytes()).await.expect("a file is written");
    }

    async fn read(&self, sandbox: &SandboxId) -> String {
        let bridge = self.dial(sandbox).await;
        let bytes =
            bridge.file_read(FILE, Some("root".to_owned()), 1024).await.expect("the file is there");
        String::from_utf8(bytes).expect("it holds what was written")
    }

    async fn remove(&self, sandbox: &SandboxId) {
        self.provider.remove(sandbox).await.expect("a sandbox is removed");
    }

    async fn delete(&self, snapshot: &SnapshotId) {
        if let Some(snapshots) = self.provider.snapshots() {
            snapshots.remove(snapshot).await.expect("a snapshot is removed");
            snapshots.remove(snapshot).await.expect("snapshot removal is idempotent");
        }
    }

    async fn started_sandbox_is_listed_and_runs_commands(&self) {
        let sandbox = self.fresh().await;
        let found = self.provider.find(&sandbox).await.expect("find works");
        assert!(matches!(found, Found::Running), "a started sandbox runs: {found:?}");
        let listed = self.provider.list().await.expect("sandboxes are listed");
        let listed = listed.iter().find(|listed| listed.id == sandbox);
        let listed = listed.expect("a running sandbox is listed");
        assert_eq!(listed.owner, SandboxOwner::Session, "with its owner");
        let bridge = self.dial(&sandbox).await;
        let argv = ["echo", "hello"].map(str::to_owned).to_vec();
        let command = Command { argv, ..Command::default() };
        let output = bridge.run_command(command).await.expect("a command runs");
        assert_eq!((output.exit, &output.tail[..]), (Exit::Code(0), &b"hello\n"[..]));
        self.remove(&sandbox).await;
    }

    /// A provider may not count; but a count is never zero.
    async fn usage_counts_the_work_of_commands(&self) {
        let sandbox = self.fresh().await;
        let usage = async || self.provider.usage(&sandbox).await.expect("usage can be asked for");
        if let Some(before) = usage().await {
            assert!(before.memory_bytes > 0, "a running sandbox uses memory");
            let work = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
            let argv = ["sh", "-c", work].map(str::to_owned).to_vec();
            let bridge = self.dial(&sandbox).await;
            let ran = bridge.run_command(Command { argv, ..Command::default() }).await;
            assert!(ran.expect("a command runs").ok());
            let after = usage().await.expect("it still counts");
            assert!(after.cpu_micros >= before.cpu_micros + 1000, "{before:?}, {after:?}");
            self.provider.stop(&sandbox).await.expect("a sandbox stops");
            self.provider.wait(&sandbox).await.expect("the exit is reported");
            let dead = usage().await.expect("it knows what a dead sandbox has used");
            assert!(dead.cpu_micros >= after.cpu_micros, "{after:?}, {dead:?}");
            assert_eq!(dead.memory_bytes, 0, "a dead sandbox uses no memory");
        }
        self.remove(&sandbox).await;
        let gone = self.provider.usage(&sandbox).await.expect("usage can be asked for");
        assert_eq!(gone, None, "nothing is known of a removed sandbox");
    }

    async fn snapshot_and_remove_preserves_files(&self) {
        let (first, snapshot) = (self.fresh().await, SnapshotId::random());
        self.write(&first, "kept").await;
        for _ in 0..2 {
            let saved =
                self.provider.snapshot_and_remove(&first, &snapshot, SnapshotKind::Pause).await;
            saved.expect("snapshot_and_remove is idempotent");
        }
        let found = self.provider.find(&first).await.expect("find works");
        assert_eq!(found, Found::Gone, "a sandbox is gone after snapshot_and_remove");
        let second = self.start(StartFrom::Snapshot(snapshot.clone())).await;
        assert_eq!(self.read(&second).await, "kept");
        self.remove(&second).await;
        self.delete(&snapshot).await;
    }

    async fn running_sandbox_is_snapshotted_and_forked(&self) {
        let Some(snapshots) = self.provider.snapshots() else { return };
        let (source, snapshot) = (self.fresh().await, SnapshotId::random());
        self.write(&source, "before").await;
        for _ in 0..2 {
            let captured = snapshots.capture(&source, &snapshot, Some(SnapshotKind::Turn)).await;
            captured.expect("capturing is idempotent");
        }
        self.write(&source, "after").await;
        let forks = [
            self.start(StartFrom::Snapshot(snapshot.clone())).await,
            self.start(StartFrom::Snapshot(snapshot.clone())).await,
        ];
        self.write(&forks[0], "mine").await;
        assert_eq!(self.read(&forks[1]).await, "before", "forks do not see each other");
        assert_eq!(self.read(&source).await, "after", "the source is independent of its forks");
        for sandbox in forks.iter().chain([&source]) {
            self.remove(sandbox).await;
        }
        self.delete(&snapshot).await;
    }

    async fn frozen_sandbox_runs_after_thaw(&self) {
        let Some(freezing) = self.provider.freeze_control() else { return };
        let (sandbox, hold) = (self.fresh().await, Duration::from_secs(60));
        for _ in 0..2 {
            freezing.freeze(&sandbox, hold).await.expect("a freeze can be renewed");
        }
        // The supervisor keeps answering.
        self.write(&sandbox, "frozen").await;
        let bridge = self.dial(&sandbox).await;
        let argv = ["echo", "on"].map(str::to_owned).to_vec();
        let command = bridge.run_command(Command { argv, ..Command::default() });
        let order = Mutex::new(Vec::new());
        let note = |what| order.lock().expect("no holder of this lock panics").push(what);
        let ran = async {
            let ran = command.await.expect("a command runs");
            note("ran");
            ran
        };
        let thawed = async {
            assert_eq!(self.read(&sandbox).await, "frozen");
            note("thawed");
            for _ in 0..2 {
                freezing.thaw(&sandbox).await.expect("a thaw is idempotent");
            }
        };
        let (ran, ()) = tokio::join!(ran, thawed);
        assert_eq!((ran.exit, &ran.tail[..]), (Exit::Code(0), &b"on\n"[..]));
        let order = order.into_inner().expect("no holder of this lock panics");
        assert_eq!(order, ["thawed", "ran"], "nothing runs in a frozen sandbox");
        // A freeze that is not renewed ends by itself.
        freezing
            .freeze(&sandbox, Duration::from_millis(50))
            .await
            .expect("a sandbox is frozen again");
        let argv = ["echo", "by itself"].map(str::to_owned).to_vec();
        let ran = bridge.run_command(Command { argv, ..Command::default() }).await;
        assert!(ran.expect("a command runs").ok(), "an expired freeze ends");
        freezing.freeze(&sandbox, hold).await.expect("a sandbox is frozen again");
        self.remove(&sandbox).await;
        assert!(
            freezing.freeze(&sandbox, hold).await.is_err(),
            "a removed sandbox cannot be frozen"
        );
    }

    async fn dead_sandbox_leaves_its_disk(&self) {
        let (sandbox, snapshot) = (self.fresh().await, SnapshotId::random());
        self.write(&sandbox, "left").await;
        let stream =
            self.provider.connect(&sandbox).await.expect("a started sandbox can be dialled");
        // Only the owner may shut it down.
        let role = BridgeRole::Owner { lease: 1, epoch: 1, stored: 0 };
        let owner = Bridge::open(stream, role, None)
            .await
            .expect("the supervisor accepts the connection")
            .bridge;
        owner.send(ToSupervisor::Shutdown { id: 1_000_000 });
        let reason = self.provider.wait(&sandbox).await.expect("the exit is reported");
        assert!(!reason.is_empty(), "an exit has a reason");
        let found = self.provider.find(&sandbox).await.expect("find works");
        assert!(matches!(found, Found::Dead { .. }), "a dead sandbox is found dead: {found:?}");
        assert!(self.provider.connect(&sandbox).await.is_err(), "a dead sandbox does not answer");
        let saved =
            self.provider.snapshot_and_remove(&sandbox, &snapshot, SnapshotKind::Recovered).await;
        saved.expect("a dead sandbox's disk is saved");
        let next = self.start(StartFrom::Snapshot(snapshot.clone())).await;
        assert_eq!(self.read(&next).await, "left");
        self.remove(&next).await;
        self.delete(&snapshot).await;
    }

    async fn remove_is_idempotent_and_leaves_nothing(&self) {
        let sandbox = self.fresh().await;
        self.remove(&sandbox).await;
        self.remove(&sandbox).await;
        self.remove(&SandboxId::random()).await;
        assert_eq!(self.provider.find(&sandbox).await.expect("find works"), Found::Gone);
        let listed = self.provider.list().await.expect("sandboxes are listed");
        assert!(
            listed.iter().all(|listed| listed.id != sandbox),
            "a removed sandbox is not listed"
        );
    }

    async fn missing_objects_are_errors(&self) {
        let spec =
            |from| SandboxSpec::of_session(SandboxId::random(), from, SandboxLimits::default());
        let missing = StartFrom::Snapshot(SnapshotId::random());
        assert!(
            !self.provider.can_start_from(&missing).await.expect("find works"),
            "an unknown snapshot"
        );
        assert!(self.provider.create(spec(missing)).await.is_err(), "an unknown snapshot");
        for (name, there) in [(self.image.as_str(), true), ("no-such-image", false)] {
            let held = self.provider.can_start_from(&StartFrom::Image(name.to_owned())).await;
            assert_eq!(held.expect("find works"), there, "{name}");
        }
        let (unknown, snapshot) = (SandboxId::random(), SnapshotId::random());
        let saved =
            self.provider.snapshot_and_remove(&unknown, &snapshot, SnapshotKind::Pause).await;
        assert!(saved.is_err(), "an unknown sandbox cannot be saved");
        assert!(
            self.provider.connect(&unknown).await.is_err(),
            "an unknown sandbox does not answer"
        );
    }
}
