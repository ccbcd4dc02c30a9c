//! Faults: programs that misbehave, processes killed at the worst moment, full and read-only disks,
//! nonsense on every socket, records torn apart. Whatever happens hurts only its own sandbox, is told
//! with its reason, and leaves nothing that nobody looks after (`World::assert_nothing_left`).

#[path = "faults/commands.rs"]
mod commands;
#[path = "faults/disks.rs"]
mod disks;
#[path = "faults/hogs.rs"]
mod hogs;
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

/// A process of its own that uses the engine: this very program in another role, to be killed.
struct Caller(Child);

impl Caller {
    fn new(world: &World, act: &str, sandbox: &SandboxId, snapshot: &SnapshotId) -> Self {
        let child = HostCommand::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::a_caller", "--nocapture", "--quiet"])
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

/// Not a test but what a [`Caller`] runs as.
#[test]
fn a_caller() {
    let Ok(act) = std::env::var("HARVEST_CALLER") else { return };
    let of = |name: &str| std::env::var(format!("HARVEST_CALLER_{name}")).unwrap();
    let zygote = vec![env!("CARGO_BIN_EXE_harvest-zygote").into()];
    let engine =
        Engine::open(config(Path::new(&of("HOME")), Path::new(&of("CACHE")), zygote)).unwrap();
    let id: SandboxId = of("SANDBOX").parse().unwrap();
    let SandboxState::Running(running) = engine.find(&id).unwrap() else {
        panic!("it does not run")
    };
    match act.as_str() {
        "exec" => drop(shell(&running, "setsid sleep 1000 & echo $$ > /tmp/started; sleep 1000")),
        "freeze" => engine.freeze(&id).unwrap(),
        "capture" => loop {
            engine.capture(&id, &SnapshotId::random()).unwrap();
        },
        "end_kept" => drop(engine.end_kept(&id, &of("SNAPSHOT").parse().unwrap()).unwrap()),
        other => panic!("unknown act {other}"),
    }
    // Until it is killed: what it holds must not end with its own exit.
    loop {
        thread::park();
    }
}

/// Numbers that look random and are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}
