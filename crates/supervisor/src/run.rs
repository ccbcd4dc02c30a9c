//! The supervisor role: receives the launch, builds the parts, serves the bridge, and shuts down.

use std::{cell::RefCell, process::ExitCode, rc::Rc, time::Duration};

use harvest_proto::launch::{Descriptor, Launch};
use tokio::{
    signal::unix::{SignalKind, signal},
    task::LocalSet,
    time::timeout,
};

use crate::{
    bridge::{self, Bridge},
    cgroup::{AgentGroup, OomCount},
    door, freeze,
    launch::{InheritedFds, LaunchError, PendingLaunch},
    log,
    meminfo::Meminfo,
    processes::{Processes, limit_file_size},
    reaper,
    sandbox::Sandbox,
    settings,
    sync::SyncProgress,
};

// Threads for file access.
const BLOCKING_THREADS: usize = 4;
const BLOCKING_STACK_BYTES: usize = 256 * 1024;

// The time processes have between SIGTERM and the exit of pid 1, which kills them.
const GRACE: Duration = Duration::from_secs(3);

// With its wake-ups, 0.2 ms of CPU time on a busy host: 200 sandboxes that all run a command take
// 4 % of one CPU for it.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn main() -> ExitCode {
    log::exit_code("", run())
}

fn run() -> Result<(), LaunchError> {
    let pending = PendingLaunch::receive()?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // Pid 1 reaps orphans anyway; outside a pid namespace this makes it do so.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(std::io::Error::from)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(BLOCKING_STACK_BYTES)
        .thread_keep_alive(Duration::from_secs(2))
        .build()?;
    LocalSet::new().block_on(&runtime, async {
        serve(pending).await?;
        #[expect(clippy::disallowed_methods, reason = "a blocked file thread would delay the exit")]
        std::process::exit(0)
    })
}

async fn serve(mut pending: PendingLaunch) -> Result<(), LaunchError> {
    tokio::task::spawn_local(reaper::run());
    let joins = pending.inherited.take_all(Descriptor::JoinCommands);
    let processes = Processes::new(joins, pending.on_settled()?);
    let (mut launch, mut inherited) = pending.wait_for_launch().await?;
    limit_file_size(launch.file_bytes)?;
    let socket = inherited.take(Descriptor::Bridge).ok_or(LaunchError::NoBridge)?;
    let listener = bridge::listener(socket)?;
    if let Some(orders) = inherited.take(Descriptor::FreezeOrders) {
        tokio::task::spawn_local(freeze::run(orders));
    }
    let model_activity = door::open(&mut inherited, launch.sealed)?;
    settings::apply(&mut launch, inherited.take(Descriptor::Settings));
    let id = launch.sandbox.clone();
    let bridge = Bridge::new(Sandbox { model_activity, ..sandbox(launch, processes, inherited) });
    tokio::task::spawn_local(refresh_meminfo(Rc::clone(&bridge)));
    log::line(format_args!("{id} started"));
    let mut terminated = signal(SignalKind::terminate())?;
    tokio::select! {
        () = bridge.serve(listener) => {}
        () = bridge.shutdown.notified() => {}
        _ = terminated.recv() => {}
    }
    bridge.turns.shut_down().await;
    terminate_all().await;
    log::line(format_args!("{id} exits"));
    Ok(())
}

fn sandbox(launch: Launch, processes: Rc<Processes>, mut inherited: InheritedFds) -> Sandbox {
    Sandbox {
        launch,
        session_env: RefCell::default(),
        shell_env: RefCell::default(),
        processes,
        agent_group: AgentGroup::new(&mut inherited),
        oom: OomCount::new(&mut inherited),
        meminfo: Meminfo::new(&mut inherited),
        app: inherited.take(Descriptor::App),
        detached: Rc::default(),
        model_activity: Rc::default(),
        sync: SyncProgress::default(),
    }
}

/// Refreshes `/proc/meminfo` once a second while a command or a turn runs. An idle sandbox, or one
/// that waits for an answer, is not woken: it may be frozen for days.
async fn refresh_meminfo(bridge: Rc<Bridge>) {
    let (processes, turns) = (&bridge.sandbox.processes, &bridge.turns);
    while let Some(meminfo) = &bridge.sandbox.meminfo {
        meminfo.refresh();
        if processes.are_running() || turns.is_working() {
            let _new_command = timeout(REFRESH_INTERVAL, processes.started.notified()).await;
        } else {
            tokio::select! {
                () = processes.started.notified() => {}
                () = turns.resumed.notified() => {}
            }
        }
    }
}

async fn terminate_all() {
    if !freeze::signal_all(rustix::process::Signal::TERM) {
        return;
    }
    let all_exited = async {
        while !reaper::reap_all() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let _some_left = timeout(GRACE, all_exited).await;
}
