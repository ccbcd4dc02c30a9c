//! Fault tests: misbehaving programs, processes killed at the worst moment, full and read-only
//! disks, garbage on every socket, corrupt records. A fault affects only its own sandbox, is
//! reported with its reason, and leaves nothing behind (`World::assert_nothing_left`).

#[path = "faults/commands.rs"]
mod commands;
#[path = "faults/disks.rs"]
mod disks;
#[path = "faults/exhaustion.rs"]
mod exhaustion;
#[path = "faults/kills.rs"]
mod kills;
#[path = "faults/records.rs"]
mod records;
#[path = "faults/sockets.rs"]
mod sockets;

use harvest_proto::SnapshotId;

use super::*;

fn signal(pid: u32, signal: &str) -> bool {
    HostCommand::new("kill").args([signal, &pid.to_string()]).status().unwrap().success()
}

/// A separate process that uses the engine and can be killed: this test program in another role.
struct Caller(Child);

impl Caller {
    fn new(world: &World, act: &str, sandbox: &SandboxId, snapshot: &SnapshotId) -> Self {
        let child = HostCommand::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::caller_process", "--nocapture", "--quiet"])
            .env("HARVEST_CALLER", act)
            .env("HARVEST_CALLER_HOME", &world.home)
            .env("HARVEST_CALLER_CACHE", world.folder.path().join("cache"))
            .env("HARVEST_CALLER_SANDBOX", sandbox.to_string())
            .env("HARVEST_CALLER_SNAPSHOT", snapshot.to_string())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Not a test: the body of a [`Caller`] process.
#[test]
fn caller_process() {
    let Ok(act) = std::env::var("HARVEST_CALLER") else { return };
    let variable = |name: &str| std::env::var(format!("HARVEST_CALLER_{name}")).unwrap();
    let zygote = vec![env!("CARGO_BIN_EXE_harvest-zygote").into()];
    let engine =
        Engine::open(config(Path::new(&variable("HOME")), Path::new(&variable("CACHE")), zygote))
            .unwrap();
    let id: SandboxId = variable("SANDBOX").parse().unwrap();
    let SandboxState::Running(running) = engine.find(&id).unwrap() else {
        panic!("the sandbox is not running")
    };
    match act.as_str() {
        "exec" => drop(shell(&running, "setsid sleep 1000 & echo $$ > /tmp/started; sleep 1000")),
        "freeze" => engine.freeze(&id).unwrap(),
        "capture" => loop {
            engine.capture(&id, &SnapshotId::random()).unwrap();
        },
        "stop_and_save" => {
            drop(engine.stop_and_save(&id, &variable("SNAPSHOT").parse().unwrap()).unwrap())
        }
        other => panic!("unknown act {other}"),
    }
    // Wait to be killed: what the process holds must not be released by a normal exit.
    loop {
        thread::park();
    }
}

/// A pseudo-random generator with a fixed seed, so that every run is the same.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}
