//! The rows of writes inside a sandbox: fio on a disk in plain folders and on one on btrfs, with
//! the same work in the same run. The host's fio is mounted into the sandboxes.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use harvest_engine::{Bind, Limits, Running};

use crate::{
    harvest::in_sandbox,
    options::Options,
    report::Report,
    runner::{Benchmark, run as run_interleaved},
    workspace::Workspace,
};

const FIO: &str = "/usr/bin/fio";
// fio needs libraries that the sandbox's image does not have.
const LOADER: &str = "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
const LIBRARIES: &str = "/stage/lib/x86_64-linux-gnu:/stage/lib/x86_64-linux-gnu/ceph";

// Large enough that no row measures how the kernel reclaims the page cache of a small limit.
const MEMORY_BYTES: u64 = 4 << 30;

/// The rows of each kind of work: in plain folders, on btrfs.
const ROWS: [[&str; 2]; 4] = [
    ["writes: 1,000 × 4 KiB and fsync, dir", "writes: 1,000 × 4 KiB and fsync, btrfs"],
    ["writes: 128 MiB random, then sync, dir", "writes: 128 MiB random, then sync, btrfs"],
    ["writes: 128 MiB random by mmap, dir", "writes: 128 MiB random by mmap, btrfs"],
    ["writes: 512 MiB in a row, then sync, dir", "writes: 512 MiB in a row, then sync, btrfs"],
];

/// The options of fio for each kind of work.
const WORK: [&[&str]; 4] = [
    &["--ioengine=psync", "--rw=write", "--bs=4k", "--size=4000k", "--fsync=1"],
    &["--ioengine=psync", "--rw=randwrite", "--bs=4k", "--size=128m", "--end_fsync=1"],
    &["--ioengine=mmap", "--rw=randwrite", "--bs=4k", "--size=128m", "--end_fsync=1"],
    &["--ioengine=psync", "--rw=write", "--bs=1m", "--size=512m", "--end_fsync=1"],
];

/// Targets for p50 on btrfs, as a multiple of that in plain folders.
pub(crate) const TARGETS: [(&str, &[&str], f64); 4] = [
    (ROWS[0][1], &[ROWS[0][0]], 2.0),
    (ROWS[1][1], &[ROWS[1][0]], 2.0),
    (ROWS[2][1], &[ROWS[2][0]], 2.0),
    (ROWS[3][1], &[ROWS[3][0]], 2.0),
];

/// Whether a row belongs to this group.
pub(crate) fn is_row(name: &str) -> bool {
    name.starts_with("writes: ")
}

/// Measures the rows and adds them to the report.
pub(crate) fn run(workspace: &Workspace, options: &Options, report: &mut Report) {
    if let Err(error) = measure(workspace, options, report) {
        report.skipped.push((ROWS[0][0].to_owned(), error.root_cause().to_string()));
    }
}

fn measure(workspace: &Workspace, options: &Options, report: &mut Report) -> Result<()> {
    for program in [FIO, LOADER] {
        ensure!(Path::new(program).exists(), "{program} is missing (package fio)");
    }
    let btrfs = workspace.on_btrfs().context("cannot create a store on btrfs")?;
    let mut sandboxes = Vec::new();
    for engine in [&workspace.engine, &btrfs.0] {
        let mut spec = workspace.spec()?;
        spec.binds = vec![Bind { source: "/usr".into(), inside: "/stage".into() }];
        spec.limits = Limits { memory_bytes: MEMORY_BYTES, ..spec.limits };
        sandboxes.push(engine.start(&spec)?);
    }
    let mut benchmarks = Vec::new();
    for (rows, work) in ROWS.into_iter().zip(WORK) {
        for (row, sandbox) in rows.into_iter().zip(&sandboxes) {
            benchmarks.push(Benchmark::whole(row, move || fio(sandbox, work)));
        }
    }
    let rounds = (options.rounds / 5).clamp(1, 10);
    report.add(run_interleaved(&mut benchmarks, rounds, options.gap)?);
    drop(benchmarks);
    for (engine, sandbox) in [&workspace.engine, &btrfs.0].into_iter().zip(&sandboxes) {
        engine.remove(&sandbox.id)?;
    }
    Ok(())
}

/// Does the work on one file, which keeps its blocks between two runs, as a database does.
fn fio(sandbox: &Running, work: &[&str]) -> Result<()> {
    let file = format!("--filename=/changed/{}", work.join("-").replace(['=', '-'], ""));
    let (loader, program) = (LOADER.replace("/usr", "/stage"), FIO.replace("/usr", "/stage"));
    let mut words = vec![&loader, "--library-path", LIBRARIES, &program];
    words.extend(["--name=work", "--thread", "--allow_file_create=1", "--fallocate=none", &file]);
    words.extend(work);
    in_sandbox(&sandbox.bridge, &words)
}
