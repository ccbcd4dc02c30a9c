//! Measures the engine beside its peers, in one interleaved run on one machine. See README.md for how
//! to read what it prints. Not part of any test: a shared machine gives no honest times.
#![forbid(unsafe_code)]

mod contest;
mod disks;
mod harvest;
mod http;
mod machine;
mod memory;
mod options;
mod peers;
mod place;
mod pool;
mod report;
mod sessions;
mod store;

use std::{
    fs,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail};

use contest::{Contestant, run};
use machine::Machine;
use options::Options;
use place::Place;
use report::Report;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    // The bench is its own zygote, so that what is measured is the engine built with it.
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
    if !options.alone {
        return again_alone();
    }
    let hidden = place::hide_bare_cgroup2()?;
    let machine = Machine::look(hidden);
    eprintln!("{}", machine.line());
    let place = Place::make(&options.folder)?;
    let mut report = Report::new(machine);
    let mut contestants = Vec::new();
    contestants.extend(peers::fork_exec(&place));
    contestants.extend(harvest::contestants(&place)?);
    if options.wants(http::FIRST_OUTPUT) {
        contestants.push(http::contestant(&place)?);
    }
    if options.peers {
        for offered in peers::all(&place) {
            offered.enter(&mut contestants, &mut report);
        }
    }
    contestants.retain(|one: &Contestant| options.wants(one.rows[0]));
    report.add(run(&mut contestants, options.rounds, options.gap)?);
    drop(contestants);
    if options.wants("memory") {
        report.memory = Some(memory::after_execs(&place, memory::EXECS)?);
    }
    if options.wants("pool") {
        pool::run(&place, options, &mut report)?;
    }
    if options.disks && options.wants("disk") {
        disks::run(&place, options, &mut report)?;
    }
    if options.wants("session") {
        sessions::run(options, &mut report)?;
    }
    if options.wants("store") {
        store::run(&place, options, &mut report)?;
    }
    report.finish();
    println!("{report}");
    if options.quick {
        println!(
            "quick: three rounds and far smaller trees than the rows are named for; these numbers mean nothing"
        );
    }
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Runs the bench in a mount namespace of its own: what it mounts and hides is gone when it ends,
/// however it ends.
fn again_alone() -> Result<()> {
    let program = std::env::current_exe().context("cannot find the bench itself")?;
    let status = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--"])
        .arg(program)
        .arg("--alone")
        .args(std::env::args_os().skip(1))
        .status()
        .context("cannot run unshare (util-linux)")?;
    if status.success() { Ok(()) } else { bail!("the bench ended with {status}; it needs root") }
}
