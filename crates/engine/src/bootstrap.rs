//! A Debian root file system, off the mirror the host itself uses. Calls `mmdebstrap`; knows no mirror
//! by name.

use std::{
    fs,
    io::{self, BufRead, BufReader},
    os::unix::{fs::MetadataExt, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
};

use harvest_proto::redact;

use crate::{
    EngineError,
    build::{Tail, host},
    disk::disk_error,
};

// Nobody needs these inside a sandbox, and they are a third of a small Debian. dpkg keeps the list,
// so that packages installed later leave them out too. Copyright files stay: licences ask for them.
const LEFT_OUT: [&str; 16] = [
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/bug/*",
    "path-exclude=/usr/share/help/*",
    "path-exclude=/usr/share/vim/vim*/doc/*.txt",
    "path-exclude=/usr/share/vim/vim*/lang/*",
    "path-exclude=/usr/share/vim/vim*/tutor/*",
    // Every locale can still be made, in UTF-8.
    "path-exclude=/usr/share/i18n/charmaps/*",
    "path-include=/usr/share/i18n/charmaps/UTF-8.gz",
    "path-exclude=/usr/share/i18n/locales/cns11643_stroke",
    // 32 MB to look into a compiler's own files, and 25 MB of an interpreter to link into programs.
    "path-exclude=/usr/bin/*lto-dump*",
    "path-exclude=/usr/lib/python3*/config-*/libpython*.a",
];

/// Where the image keeps its Debian sources.
pub(crate) const SOURCES: &str = "etc/apt/sources.list.d/debian.sources";

/// Fills the empty folder `root` with a Debian.
pub(crate) fn debian(
    suite: &str,
    include: &[String],
    root: &Path,
    output: &mut dyn FnMut(&str),
) -> Result<(), EngineError> {
    let scratch = root.with_extension("sources");
    let sources = host::debian_sources(suite);
    if sources.is_empty() {
        let what = format!("find the packages of Debian {suite}");
        let tail =
            vec![format!("this host's apt sources name no Debian {suite} and no other Debian")];
        return Err(EngineError::Build {
            what,
            tail,
            hint: "add Debian's sources to /etc/apt/sources.list.d",
        });
    }
    fs::create_dir(&scratch).map_err(|e| disk_error("create", &scratch, e))?;
    let file = scratch.join("debian.sources");
    let made = fs::write(&file, host::render_sources(&sources, true))
        .map_err(|e| disk_error("write", &file, e))
        .and_then(|()| run(suite, include, root, &file, output))
        // Where the packages come from stays in the image; who fetched them does not.
        .and_then(|()| tidy(root, &redact::without_logins(&host::render_sources(&sources, false))));
    // Ours and tiny; a leftover is collected with the rest of what was being built.
    let _ = fs::remove_dir_all(&scratch);
    made
}

fn run(
    suite: &str,
    include: &[String],
    root: &Path,
    sources: &Path,
    output: &mut dyn FnMut(&str),
) -> Result<(), EngineError> {
    // `unshare`: what it mounts and what it starts are gone with it, however it ends.
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--",
        "mmdebstrap",
    ]);
    command.args(["--variant=minbase", "--format=directory"]);
    if !include.is_empty() {
        command.arg(format!("--include={}", include.join(",")));
    }
    command.args(LEFT_OUT.iter().map(|option| format!("--dpkgopt={option}")));
    // A layer is synced once, before it gets its name; a sync per file would only take longer.
    command.arg("--dpkgopt=force-unsafe-io");
    command.args(host::apt_settings().iter().map(|setting| format!("--aptopt={setting}")));
    command.arg("--aptopt=Acquire::Languages \"none\";");
    // The environment has no place for a terminal's questions.
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command.arg(suite).arg(root).arg(sources);
    let (what, mut tail) = (format!("bootstrap Debian {suite}"), Tail::default());
    let failed = |tail: Vec<String>| {
        let hint = "install what is missing with `apt-get install mmdebstrap`";
        EngineError::Build { what: what.clone(), tail, hint }
    };
    let ended = stream(&mut command, &mut |line| {
        let line = redact::cover(line);
        tail.push(&line);
        output(&line);
    });
    match ended {
        Ok(true) => Ok(()),
        Ok(false) => Err(failed(tail.lines())),
        Err(error) => Err(failed(vec![format!("cannot run mmdebstrap: {error}")])),
    }
}

fn stream(command: &mut Command, line: &mut dyn FnMut(&str)) -> io::Result<bool> {
    let (reader, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    // SAFETY: between fork and exec only one system call is made, on plain integers.
    unsafe {
        command.pre_exec(|| {
            let signal = Some(rustix::process::Signal::KILL);
            rustix::process::set_parent_process_death_signal(signal).map_err(Into::into)
        });
    }
    let mut child = command.spawn()?;
    // Our copies of the writing end must go, or the reading below never ends.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut bytes = Vec::new();
    let mut reader = BufReader::new(reader);
    while reader.read_until(b'\n', &mut bytes)? > 0 {
        line(String::from_utf8_lossy(&bytes).trim_end());
        bytes.clear();
    }
    Ok(child.wait()?.success())
}

// What mmdebstrap took over from this host goes, and what a sandbox mounts over is there and empty.
fn tidy(root: &Path, sources: &str) -> Result<(), EngineError> {
    let at = |path: &str| root.join(path);
    // A fresh tree of Debian's own packages: nobody hostile has been in it yet.
    for path in ["etc/apt/apt.conf.d/99mmdebstrap", "etc/apt/sources.list"] {
        crate::disk::remove_file(&at(path))?;
    }
    let parts = at("etc/apt/sources.list.d");
    for name in crate::disk::names_in(&parts)? {
        crate::disk::remove_file(&parts.join(name))?;
    }
    for (path, text) in
        [(SOURCES, sources), ("etc/resolv.conf", ""), ("etc/hostname", ""), ("etc/hosts", "")]
    {
        crate::disk::remove_file(&at(path))?;
        fs::write(at(path), text).map_err(|e| disk_error("write", at(path), e))?;
    }
    let foreign = fs::metadata(root).map_err(|e| disk_error("read", root, e))?.uid() != 0;
    if foreign {
        return Err(disk_error(
            "use",
            root,
            io::Error::other("the root folder does not belong to root"),
        ));
    }
    // A sandbox has devices of its own.
    fs::remove_dir_all(at("dev")).map_err(|e| disk_error("tidy", at("dev"), e))?;
    for folder in ["dev", "proc", "sys", "run", "tmp"] {
        fs::create_dir_all(at(folder)).map_err(|e| disk_error("create", at(folder), e))?;
    }
    Ok(())
}
