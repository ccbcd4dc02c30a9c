//! One step of a recipe as the sandbox sees it: its command, what it says, what it must not leave
//! behind. Runs nothing itself.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::AsFd,
    path::Path,
};

use harvest_proto::bridge::Command;
use rustix::fs::AtFlags;

use crate::{
    EngineError,
    disk::disk_error,
    recipe::{Base, Make},
    spec::ImageConfig,
    tree,
};

// The last lines of what a step said are what explains its failure.
const TAIL_LINES: usize = 40;

// A build that takes longer is stuck.
const STEP_TIMEOUT_MILLIS: u64 = 30 * 60 * 1000;

// For images that set none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// Each word of a recipe as a shell sees it; packages are its arguments, so no quoting can go wrong.
const APT: &str = "set -e
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

/// Whatever a sandbox mounts over is made where the image lacks it. Those places are no part of the step.
pub(super) fn scrub(layer: &Path) -> Result<(), EngineError> {
    let root = tree::open_root(layer)?;
    let failed = |e| disk_error("tidy", layer, e);
    // Only through real folders: a step may have put links where these were.
    if let Ok(run) = tree::open_folder(root.as_fd(), Path::new("run")) {
        // Each goes only if it is empty, and `run` only if it hides nothing: it is there below, then.
        let gone = rustix::fs::unlinkat(&run, "harvest", AtFlags::REMOVEDIR).is_ok();
        if gone && !tree::is_opaque(run.as_fd()).map_err(failed)? {
            let _ = rustix::fs::unlinkat(&root, "run", AtFlags::REMOVEDIR);
        }
    }
    if let Ok(etc) = tree::open_folder(root.as_fd(), Path::new("etc")) {
        for name in [c"resolv.conf", c"hosts", c"hostname"] {
            if tree::stat(etc.as_fd(), name)
                .is_ok_and(|stat| stat.st_size == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFREG)
            {
                rustix::fs::unlinkat(&etc, name, AtFlags::empty()).map_err(failed)?;
            }
        }
    }
    Ok(())
}

/// A step as a command.
pub(super) fn shell(step: &Make, config: &ImageConfig, host: &BTreeMap<String, String>) -> Command {
    let script = |text: &str, packages: &[String]| {
        let mut argv: Vec<String> = ["sh", "-c", text, "step"].map(str::to_owned).into();
        argv.extend_from_slice(packages);
        argv
    };
    // What installs for everyone runs as root; a `run` step is the image's own business.
    let (argv, user) = match step {
        Make::Apt(packages) => (script(APT, packages), "root"),
        Make::Npm(packages) => (script(NPM, packages), "root"),
        Make::Pip(packages) => (script(PIP, packages), "root"),
        Make::Run(text) => (script(text, &[]), config.user.as_str()),
        Make::Copy { .. } | Make::Env(_) | Make::User(_) | Make::Workdir(_) => {
            (script("true", &[]), "root")
        }
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
    // A step runs before the folder that sessions start in need exist.
    let cwd = matches!(step, Make::Run(_)).then(|| config.workdir.clone());
    Command {
        argv,
        env,
        cwd: Some(cwd.unwrap_or_else(|| "/".to_owned())),
        user: Some(user.to_owned()),
        timeout_millis: Some(STEP_TIMEOUT_MILLIS),
        ..Command::default()
    }
}

/// A step in words.
pub(super) fn words(step: &Make) -> String {
    match step {
        Make::Apt(packages) => format!("apt {}", packages.join(" ")),
        Make::Npm(packages) => format!("npm {}", packages.join(" ")),
        Make::Pip(packages) => format!("pip {}", packages.join(" ")),
        Make::Run(text) => {
            let telling = |line: &&str| !line.is_empty() && !line.starts_with("set ");
            let first = text.lines().map(str::trim).find(telling).unwrap_or_default();
            // A script may say in a comment what it does.
            let first = first.trim_start_matches('#').trim_start();
            format!("run {}", first.chars().take(60).collect::<String>())
        }
        Make::Copy { from, to } => format!("copy {} to {}", from.display(), to.display()),
        Make::Env(env) => format!("env {}", env.keys().cloned().collect::<Vec<_>>().join(" ")),
        Make::User(user) => format!("user {user}"),
        Make::Workdir(workdir) => format!("workdir {workdir}"),
    }
}

/// A base in words.
pub(super) fn words_of_base(base: &Base) -> String {
    match base {
        Base::Image(name) => format!("from image {name}"),
        Base::Debian { suite, .. } => format!("from Debian {suite}"),
        Base::Folder(folder) => format!("from folder {}", folder.display()),
        Base::Tar(file) => format!("from archive {}", file.display()),
        Base::Oci(reference) => format!("from {reference}"),
    }
}

/// The last lines somebody said.
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

/// Cuts bytes into lines.
#[derive(Default)]
pub(super) struct Lines(Vec<u8>);

impl Lines {
    pub(super) fn push(&mut self, bytes: &[u8], say: &mut dyn FnMut(&str)) {
        // 64 KiB without an end is no line a person reads.
        for byte in bytes {
            if *byte == b'\n' || self.0.len() >= 1 << 16 {
                self.finish(say);
            }
            if *byte != b'\n' {
                self.0.push(*byte);
            }
        }
    }

    pub(super) fn finish(&mut self, say: &mut dyn FnMut(&str)) {
        if !self.0.is_empty() {
            say(String::from_utf8_lossy(&self.0).trim_end_matches('\r'));
            self.0.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_survive_being_cut_anywhere_and_the_tail_is_the_last_forty() {
        let (mut lines, mut tail) = (Lines::default(), Tail::default());
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
    fn packages_reach_the_installer_as_arguments_not_as_shell() {
        let step = Make::Apt(vec!["jq; rm -rf /".to_owned()]);
        let command = shell(&step, &ImageConfig::default(), &BTreeMap::new());
        assert_eq!(command.argv[4], "jq; rm -rf /");
        assert!(!command.argv[2].contains("jq"));
    }

    #[test]
    fn a_mount_point_does_not_stay_in_the_layer_and_a_link_is_left_alone() {
        let layer = tempfile::tempdir().unwrap();
        let at = |path: &str| layer.path().join(path);
        fs::create_dir_all(at("run/harvest")).unwrap();
        fs::create_dir(at("etc")).unwrap();
        fs::write(at("etc/hosts"), "").unwrap();
        fs::write(at("etc/hostname"), "kept").unwrap();
        scrub(layer.path()).unwrap();
        assert!(
            !at("run/harvest").exists() && !at("etc/hosts").exists() && at("etc/hostname").exists()
        );
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("hosts"), "").unwrap();
        fs::remove_dir_all(at("etc")).unwrap();
        std::os::unix::fs::symlink(outside.path(), at("etc")).unwrap();
        scrub(layer.path()).unwrap();
        assert!(outside.path().join("hosts").exists());
    }
}
