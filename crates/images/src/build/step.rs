//! One build step: its command, its output, and the clean-up of its layer. Runs nothing itself.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::AsFd,
    path::Path,
};

use harvest_engine::{ImageConfig, tree};
use harvest_proto::bridge::Command;
use rustix::fs::{AtFlags, FileType};

use crate::{
    ImageError,
    recipe::{Base, RecipeStep},
};

// Enough output to explain a failure.
const TAIL_LINES: usize = 40;

// A step that takes longer is considered stuck.
const STEP_TIMEOUT_MILLIS: u64 = 30 * 60 * 1000;

// The default of images that set none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// The scripts of package steps. Packages are arguments of the script, so they need no quoting.
// Small Debian images lack the folder of manual pages, and packages such as Java's fail without it.
const APT: &str = "set -e
mkdir -p /usr/share/man/man1
apt-get update -qq
apt-get install -qq --yes --no-install-recommends -- \"$@\"
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/debconf/*-old /var/lib/dpkg/*-old \
/var/log/apt /var/log/dpkg.log /var/log/alternatives.log";
const NPM: &str = "set -e
npm install --global --no-audit --no-fund --no-update-notifier --cache /var/tmp/npm-cache -- \"$@\"
rm -rf /var/tmp/npm-cache /root/.npm";
const PIP: &str = "set -e
python3 -m pip install --quiet --no-cache-dir --no-compile -- \"$@\"";

/// Removes the mount points that the engine created because the image lacks them.
pub(super) fn remove_mount_points(layer: &Path) -> Result<(), ImageError> {
    let root = tree::open_root(layer)?;
    let failed = |e| ImageError::file("clean up", layer, e);
    // Follows no symlink: a step may have replaced these folders with one.
    if let Ok(run) = tree::open_folder(root.as_fd(), Path::new("run")) {
        // Only empty folders are removed, and `run` only when it is not opaque: an opaque folder
        // hides the one in the layers below.
        let removed = rustix::fs::unlinkat(&run, "harvest", AtFlags::REMOVEDIR).is_ok();
        if removed && !tree::is_opaque(run.as_fd()).map_err(failed)? {
            let _ = rustix::fs::unlinkat(&root, "run", AtFlags::REMOVEDIR);
        }
    }
    if let Ok(etc) = tree::open_folder(root.as_fd(), Path::new("etc")) {
        for name in [c"resolv.conf", c"hosts", c"hostname"] {
            if tree::stat(etc.as_fd(), name).is_ok_and(|stat| {
                stat.st_size == 0 && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            }) {
                rustix::fs::unlinkat(&etc, name, AtFlags::empty()).map_err(failed)?;
            }
        }
    }
    Ok(())
}

/// The command that runs a step.
pub(super) fn step_command(
    step: &RecipeStep,
    config: &ImageConfig,
    host: &BTreeMap<String, String>,
) -> Command {
    let script = |text: &str, packages: &[String]| {
        let mut argv: Vec<String> = ["sh", "-c", text, "step"].map(str::to_owned).into();
        argv.extend_from_slice(packages);
        argv
    };
    // Global installation needs root; a `run` step uses the image's user.
    let (argv, user) = match step {
        RecipeStep::Apt(packages) => (script(APT, packages), "root"),
        RecipeStep::Npm(packages) => (script(NPM, packages), "root"),
        RecipeStep::Pip(packages) => (script(PIP, packages), "root"),
        RecipeStep::Run(text) => (script(text, &[]), config.user.as_str()),
        RecipeStep::Copy { .. }
        | RecipeStep::Env(_)
        | RecipeStep::User(_)
        | RecipeStep::Workdir(_) => (script("true", &[]), "root"),
    };
    let home = match user {
        "root" | "0" => "/root",
        "harvest" => "/home/harvest",
        _ => "/",
    };
    let mut env = host.clone();
    for (name, value) in [
        ("HOME", home),
        ("DEBIAN_FRONTEND", "noninteractive"),
        ("PIP_BREAK_SYSTEM_PACKAGES", "1"),
        ("PIP_ROOT_USER_ACTION", "ignore"),
        ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
    ] {
        env.insert(name.to_owned(), value.to_owned());
    }
    env.insert("PATH".to_owned(), config.env.get("PATH").map_or(PATH, String::as_str).to_owned());
    // Package steps run in `/`: the image's working directory may not exist yet.
    let cwd = matches!(step, RecipeStep::Run(_)).then(|| config.workdir.clone());
    Command {
        argv,
        env,
        cwd: Some(cwd.unwrap_or_else(|| "/".to_owned())),
        user: Some(user.to_owned()),
        timeout_millis: Some(STEP_TIMEOUT_MILLIS),
        ..Command::default()
    }
}

/// A short description of a step.
pub(super) fn describe_step(step: &RecipeStep) -> String {
    match step {
        RecipeStep::Apt(packages) => format!("apt {}", packages.join(" ")),
        RecipeStep::Npm(packages) => format!("npm {}", packages.join(" ")),
        RecipeStep::Pip(packages) => format!("pip {}", packages.join(" ")),
        RecipeStep::Run(text) => {
            let meaningful = |line: &&str| !line.is_empty() && !line.starts_with("set ");
            let first = text.lines().map(str::trim).find(meaningful).unwrap_or_default();
            // The first line may be a comment that describes the script.
            let first = first.trim_start_matches('#').trim_start();
            format!("run {}", first.chars().take(60).collect::<String>())
        }
        RecipeStep::Copy { from, to } => format!("copy {} to {}", from.display(), to.display()),
        RecipeStep::Env(env) => {
            format!("env {}", env.keys().cloned().collect::<Vec<_>>().join(" "))
        }
        RecipeStep::User(user) => format!("user {user}"),
        RecipeStep::Workdir(workdir) => format!("workdir {workdir}"),
    }
}

/// A short description of a base.
pub(super) fn describe_base(base: &Base) -> String {
    match base {
        Base::Image(name) => format!("from image {name}"),
        Base::Debian { suite, .. } => format!("from Debian {suite}"),
        Base::Folder(folder) => format!("from folder {}", folder.display()),
        Base::Tar(file) => format!("from archive {}", file.display()),
        Base::Oci(reference) => format!("from {reference}"),
    }
}

/// The last lines of a command's output.
#[derive(Debug, Default)]
pub(crate) struct Tail(VecDeque<String>);

impl Tail {
    pub(crate) fn push(&mut self, line: &str) {
        if self.0.len() == TAIL_LINES {
            self.0.pop_front();
        }
        self.0.push_back(line.to_owned());
    }

    pub(crate) fn lines(self) -> Vec<String> {
        self.0.into()
    }
}

/// Splits output into lines.
#[derive(Default)]
pub(super) struct LineSplitter(Vec<u8>);

impl LineSplitter {
    pub(super) fn push(&mut self, bytes: &[u8], report: &mut dyn FnMut(&str)) {
        // Longer lines are split at 64 KiB, which bounds the memory.
        for byte in bytes {
            if *byte == b'\n' || self.0.len() >= 1 << 16 {
                self.finish(report);
            }
            if *byte != b'\n' {
                self.0.push(*byte);
            }
        }
    }

    pub(super) fn finish(&mut self, report: &mut dyn FnMut(&str)) {
        if !self.0.is_empty() {
            report(String::from_utf8_lossy(&self.0).trim_end_matches('\r'));
            self.0.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_are_split_and_last_forty_are_kept() {
        let (mut lines, mut tail) = (LineSplitter::default(), Tail::default());
        let text: String = (0..100).map(|number| format!("line {number}\r\n")).collect();
        for piece in text.as_bytes().chunks(7) {
            lines.push(piece, &mut |line| tail.push(line));
        }
        lines.push(b"no end", &mut |line| tail.push(line));
        lines.finish(&mut |line| tail.push(line));
        let tail = tail.lines();
        assert_eq!((tail.len(), tail[0].as_str(), tail[39].as_str()), (40, "line 61", "no end"));
    }

    #[test]
    fn packages_are_arguments_not_shell_code() {
        let step = RecipeStep::Apt(vec!["jq; rm -rf /".to_owned()]);
        let command = step_command(&step, &ImageConfig::default(), &BTreeMap::new());
        assert_eq!(command.argv[4], "jq; rm -rf /");
        assert!(!command.argv[2].contains("jq"));
    }

    #[test]
    fn mount_points_are_removed_without_following_symlinks() {
        let layer = tempfile::tempdir().unwrap();
        let at = |path: &str| layer.path().join(path);
        fs::create_dir_all(at("run/harvest")).unwrap();
        fs::create_dir(at("etc")).unwrap();
        fs::write(at("etc/hosts"), "").unwrap();
        fs::write(at("etc/hostname"), "kept").unwrap();
        remove_mount_points(layer.path()).unwrap();
        assert!(
            !at("run/harvest").exists() && !at("etc/hosts").exists() && at("etc/hostname").exists()
        );
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("hosts"), "").unwrap();
        fs::remove_dir_all(at("etc")).unwrap();
        std::os::unix::fs::symlink(outside.path(), at("etc")).unwrap();
        remove_mount_points(layer.path()).unwrap();
        assert!(outside.path().join("hosts").exists());
    }
}
