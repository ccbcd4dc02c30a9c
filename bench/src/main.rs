//! Benchmarks of the engine and its peers, interleaved in one run on one machine. README.md
//! explains the output. Not part of CI: times from a shared machine are not reliable.
#![forbid(unsafe_code)]

mod agents;
mod disks;
mod gateway;
mod growth;
mod harvest;
mod http;
mod large;
mod machine;
mod memory;
mod options;
mod peers;
mod pool;
mod report;
mod runner;
mod sessions;
mod store;
mod workspace;
mod writes;

use std::{
    fs,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail};

use machine::Machine;
use options::Options;
use report::Report;
use runner::{Benchmark, run};
use workspace::Workspace;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    // The bench is its own zygote, so that it measures the engine it was built with.
    if arguments.next().is_some_and(|word| word == "zygote") {
        return harvest_engine::zygote::main(&PathBuf::from(arguments.next().unwrap_or_default()));
    }
    match Options::parse(std::env::args().skip(1)).and_then(|options| bench(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench(options: &Options) -> Result<()> {
    if options.help {
        println!("{}", options::USAGE);
        return Ok(());
    }
    if !options.in_mount_namespace {
        return rerun_in_mount_namespace();
    }
    let hidden = workspace::hide_empty_cgroup2()?;
    let machine = Machine::detect(hidden);
    eprintln!("{}", machine.line());
    let workspace = Workspace::create(&options.folder)?;
    let mut report = Report::new(machine);
    let mut benchmarks = Vec::new();
    benchmarks.extend(peers::fork_exec(&workspace));
    benchmarks.extend(harvest::benchmarks(&workspace)?);
    if options.wants(http::FIRST_OUTPUT) {
        benchmarks.push(http::benchmark(&workspace)?);
    }
    if options.peers {
        for peer in peers::all(&workspace) {
            peer.add_if_working(&mut benchmarks, &mut report);
        }
    }
    benchmarks.retain(|one: &Benchmark| options.wants(one.rows[0]));
    report.add(run(&mut benchmarks, options.rounds, options.gap)?);
    drop(benchmarks);
    if options.wants("memory") {
        report.memory = Some(memory::after_execs(&workspace, memory::EXECS)?);
    }
    if options.wants("pool") {
        pool::run(&workspace, options, &mut report)?;
    }
    if options.disks && options.wants("disk") {
        disks::run(&workspace, options, &mut report)?;
    }
    if options.disks && options.wants("writes") {
        writes::run(&workspace, options, &mut report);
    }
    if options.wants("session") {
        sessions::run(options, &mut report)?;
    }
    if options.wants("agent") {
        agents::run(&workspace.at("agents"), options, &mut report)?;
    }
    if options.wants("large") {
        large::run(options, &mut report)?;
    }
    if options.wants("gateway") {
        gateway::run(&workspace.at("hosts"), options, &mut report)?;
    }
    if options.wants("growth") {
        growth::run(options, &mut report)?;
    }
    if options.wants("store") {
        store::run(&workspace, options, &mut report)?;
    }
    report.finish();
    println!("{report}");
    if options.quick {
        println!(
            "quick run: three rounds and much smaller trees than the row names say; the numbers mean nothing"
        );
    }
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Runs the bench again in a new mount namespace, so that its mounts disappear when it ends.
fn rerun_in_mount_namespace() -> Result<()> {
    let program = std::env::current_exe().context("cannot find the bench itself")?;
    let status = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--"])
        .arg(program)
        .arg("--in-mount-namespace")
        .args(std::env::args_os().skip(1))
        .status()
        .context("cannot run unshare (util-linux)")?;
    if status.success() { Ok(()) } else { bail!("the bench ended with {status}; it needs root") }
}
