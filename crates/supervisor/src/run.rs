//! The supervisor's life from its first message to its last: builds the parts, lets them run, and
//! ends everything in order.

use std::{cell::RefCell, process::ExitCode, rc::Rc, time::Duration};

use harvest_proto::launch::{Descriptor, Launch};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::Notify,
    task::LocalSet,
    time::timeout,
};

use crate::{
    birth::{Birth, BirthError, Inheritance},
    bridge::{self, Ownership},
    cgroup::{AgentGroup, OomCount},
    door, log,
    outbox::Outbox,
    processes::{Processes, limit_file_size},
    reaper, still,
    supervisor::Supervisor,
    turn::Turns,
};

// Files are read and written off the main thread; a few at a time is plenty.
const BLOCKING_THREADS: usize = 4;
const BLOCKING_STACK_BYTES: usize = 256 * 1024;

// What processes get between SIGTERM and the end of pid 1, and of them with it.
const GRACE: Duration = Duration::from_secs(3);

/// The role's entry point.
pub(crate) fn main() -> ExitCode {
    match live() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(format_args!("{error}"));
            ExitCode::FAILURE
        }
    }
}

fn live() -> Result<(), BirthError> {
    let birth = Birth::receive()?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // Pid 1 is everybody's reaper anyway; outside a pid namespace this makes it so.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(std::io::Error::from)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(BLOCKING_STACK_BYTES)
        .thread_keep_alive(Duration::from_secs(2))
        .build()?;
    LocalSet::new().block_on(&runtime, async {
        serve(birth).await?;
        // Without taking anything apart: the kernel ends what is left, a blocked file thread too.
        std::process::exit(0)
    })
}

async fn serve(mut birth: Birth) -> Result<(), BirthError> {
    tokio::task::spawn_local(reaper::run());
    let joins = birth.inheritance.take_all(Descriptor::JoinCommands);
    let processes = Processes::new(joins, birth.settles()?);
    let (launch, mut inheritance) = birth.launched().await?;
    limit_file_size(launch.file_bytes)?;
    let bridge = inheritance.take(Descriptor::Bridge).ok_or(BirthError::NoBridge)?;
    let listener = bridge::listener(bridge)?;
    let shutdown = Rc::new(Notify::new());
    if let Some(orders) = inheritance.take(Descriptor::Still) {
        tokio::task::spawn_local(still::run(orders));
    }
    door::open(&mut inheritance, launch.sealed)?;
    let supervisor = build(launch, processes, inheritance);
    log::line(format_args!("{} is up", supervisor.launch.sandbox));
    let mut terminated = signal(SignalKind::terminate())?;
    tokio::select! {
        () = bridge::serve(Rc::clone(&supervisor), listener, Rc::clone(&shutdown)) => {}
        () = shutdown.notified() => {}
        _ = terminated.recv() => {}
    }
    supervisor.turns.shut_down().await;
    end_the_rest().await;
    log::line(format_args!("{} ends", supervisor.launch.sandbox));
    Ok(())
}

fn build(launch: Launch, processes: Rc<Processes>, mut inheritance: Inheritance) -> Rc<Supervisor> {
    let agent_group = AgentGroup::new(
        inheritance.take_all(Descriptor::JoinAgent),
        inheritance.take(Descriptor::AgentProcs),
        inheritance.take(Descriptor::AgentKill),
        inheritance.take(Descriptor::AgentFreezer),
    );
    Rc::new(Supervisor {
        processes,
        outbox: Outbox::new(),
        agent_group,
        oom: OomCount::new(inheritance.take(Descriptor::OomCount)),
        ownership: Ownership::default(),
        turns: Turns::default(),
        boot: RefCell::default(),
        phase: std::cell::Cell::default(),
        failed: std::cell::Cell::default(),
        detached: std::rc::Rc::default(),
        launch,
    })
}

// Only pid 1 may say "everyone": anywhere else that would be the machine it runs on.
async fn end_the_rest() {
    let own = rustix::process::getpid();
    if !own.is_init() {
        return;
    }
    // To the kernel a negative pid 1 means every process we may signal, which is all but ourselves.
    if rustix::process::kill_process_group(own, rustix::process::Signal::TERM).is_err() {
        return;
    }
    let all_gone = async {
        while !reaper::reap_all() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let _still_some = timeout(GRACE, all_gone).await;
}
