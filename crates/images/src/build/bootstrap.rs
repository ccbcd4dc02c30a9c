//! Bootstraps a Debian root file system with `mmdebstrap`, from the mirrors that the host uses. Has
//! no default mirror.

use std::{
    fs,
    io::{self, BufRead, BufReader},
    os::unix::fs::MetadataExt,
    path::Path,
    process::{Command, Stdio},
};

use harvest_engine::kill_with_parent;
use harvest_proto::redact;

use super::{Tail, host_config};
use crate::ImageError;

// Files without a use in a sandbox; they are a third of a small Debian. dpkg stores the list, so
// that packages installed later leave them out too. Copyright files stay because licences require
// them.
const DPKG_PATHS: [&str; 16] = [
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
    // UTF-8 locales can still be generated.
    "path-exclude=/usr/share/i18n/charmaps/*",
    "path-include=/usr/share/i18n/charmaps/UTF-8.gz",
    "path-exclude=/usr/share/i18n/locales/cns11643_stroke",
    // 32 MB of a debugging tool for compilers, and 25 MB of Python for static linking.
    "path-exclude=/usr/bin/*lto-dump*",
    "path-exclude=/usr/lib/python3*/config-*/libpython*.a",
];

/// The file with an image's Debian sources.
pub(crate) const SOURCES: &str = "etc/apt/sources.list.d/debian.sources";

/// Bootstraps a Debian into the empty folder `root`.
pub(crate) fn debian(
    suite: &str,
    include: &[String],
    root: &Path,
    output: &mut dyn FnMut(&str),
) -> Result<(), ImageError> {
    let scratch = root.with_extension("sources");
    let sources = host_config::debian_sources(suite);
    if sources.is_empty() {
        let what = format!("find the packages of Debian {suite}");
        let tail = vec![format!(
            "the apt sources of this host contain neither Debian {suite} nor another Debian"
        )];
        return Err(ImageError::Step {
            what,
            tail,
            hint: "add Debian's sources to /etc/apt/sources.list.d",
        });
    }
    fs::create_dir(&scratch).map_err(|e| ImageError::file("create", &scratch, e))?;
    let file = scratch.join("debian.sources");
    let made = fs::write(&file, host_config::render_sources(&sources, true))
        .map_err(|e| ImageError::file("write", &file, e))
        .and_then(|()| run(suite, include, root, &file, output))
        // The image keeps the sources without their logins.
        .and_then(|()| {
            clean_up(root, &redact::strip_url_logins(&host_config::render_sources(&sources, false)))
        });
    // The next collection deletes any leftover.
    let _ = fs::remove_dir_all(&scratch);
    made
}

fn run(
    suite: &str,
    include: &[String],
    root: &Path,
    sources: &Path,
    output: &mut dyn FnMut(&str),
) -> Result<(), ImageError> {
    // In its own namespaces, so that its mounts and processes end with it.
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
    command.args(DPKG_PATHS.iter().map(|option| format!("--dpkgopt={option}")));
    // The finished layer is synced as a whole; fsync for each file would only cost time.
    command.arg("--dpkgopt=force-unsafe-io");
    command.args(host_config::apt_settings().iter().map(|setting| format!("--aptopt={setting}")));
    command.arg("--aptopt=Acquire::Languages \"none\";");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command.arg(suite).arg(root).arg(sources);
    let (what, mut tail) = (format!("bootstrap Debian {suite}"), Tail::default());
    let failed = |tail: Vec<String>| {
        let hint = "install mmdebstrap with `apt-get install mmdebstrap`";
        ImageError::Step { what: what.clone(), tail, hint }
    };
    let succeeded = run_command(&mut command, &mut |line| {
        let line = redact::redact(line);
        tail.push(&line);
        output(&line);
    });
    match succeeded {
        Ok(true) => Ok(()),
        Ok(false) => Err(failed(tail.lines())),
        Err(error) => Err(failed(vec![format!("cannot run mmdebstrap: {error}")])),
    }
}

// Runs a command, calls `line` with each line of its output, and returns whether it succeeded.
fn run_command(command: &mut Command, line: &mut dyn FnMut(&str)) -> io::Result<bool> {
    let (reader, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    kill_with_parent(command);
    let mut child = command.spawn()?;
    // Closes this process's copies of the write end, or the loop below never sees end of file.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut bytes = Vec::new();
    let mut reader = BufReader::new(reader);
    while reader.read_until(b'\n', &mut bytes)? > 0 {
        line(String::from_utf8_lossy(&bytes).trim_end());
        bytes.clear();
    }
    Ok(child.wait()?.success())
}

// Removes the host's settings that mmdebstrap copied, and empties the mount points of sandboxes.
fn clean_up(root: &Path, sources: &str) -> Result<(), ImageError> {
    let at = |path: &str| root.join(path);
    // Paths are safe here: the tree holds only packages of Debian.
    for path in ["etc/apt/apt.conf.d/99mmdebstrap", "etc/apt/sources.list"] {
        remove_file(&at(path))?;
    }
    let parts = at("etc/apt/sources.list.d");
    for entry in fs::read_dir(&parts).map_err(|e| ImageError::file("list", &parts, e))? {
        remove_file(&entry.map_err(|e| ImageError::file("list", &parts, e))?.path())?;
    }
    for (path, text) in
        [(SOURCES, sources), ("etc/resolv.conf", ""), ("etc/hostname", ""), ("etc/hosts", "")]
    {
        remove_file(&at(path))?;
        fs::write(at(path), text).map_err(|e| ImageError::file("write", at(path), e))?;
    }
    let foreign = fs::metadata(root).map_err(|e| ImageError::file("read", root, e))?.uid() != 0;
    if foreign {
        return Err(ImageError::file(
            "use",
            root,
            io::Error::other("the root folder does not belong to root"),
        ));
    }
    // A sandbox creates its own devices.
    fs::remove_dir_all(at("dev")).map_err(|e| ImageError::file("remove", at("dev"), e))?;
    for folder in ["dev", "proc", "sys", "run", "tmp"] {
        fs::create_dir_all(at(folder)).map_err(|e| ImageError::file("create", at(folder), e))?;
    }
    Ok(())
}

fn remove_file(path: &Path) -> Result<(), ImageError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(ImageError::file("remove", path, e)),
        _ => Ok(()),
    }
}
