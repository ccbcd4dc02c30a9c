//! A home and a cache in a temporary folder with a 2 MB image, used through the CLI without a
//! server.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{PATIENCE, Ran, binary};

const APPLETS: &str = "cat chmod echo env head id ls ln mkdir mkfifo nslookup printf ps pwd readlink rm seq \
                       setsid sh sleep tail touch true wc yes";

/// `exec` in an ephemeral sandbox of the tiny image, without the 2 GB state volume.
pub const FRESH: [&str; 4] = ["exec", "--image", "tiny", "--no-state"];

/// A home and a cache with an image called `tiny`.
pub struct OfflineHome {
    folder: tempfile::TempDir,
}

impl OfflineHome {
    /// Creates the home and builds the image.
    ///
    /// # Panics
    /// When the image cannot be built.
    #[must_use]
    pub fn new() -> Self {
        let folder = tempfile::Builder::new()
            .prefix("hv")
            .tempdir()
            .expect("a temporary folder can be made");
        let offline = Self { folder };
        write_image(&offline.folder.path().join("image"));
        let recipe = offline.folder.path().join("image/tiny.toml");
        let built =
            offline.harvest(["image", "build", recipe.to_str().expect("temporary paths are text")]);
        assert_eq!(built.code, 0, "{built:?}");
        offline
    }

    /// A path below the test's folder.
    #[must_use]
    pub fn path(&self, below: &str) -> PathBuf {
        self.folder.path().join(below)
    }

    /// The CLI, not yet started.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(binary("harvest"));
        command.env("HARVEST_HOME", self.path("home")).env("HARVEST_CACHE", self.path("cache"));
        command.env("NO_COLOR", "1").env_remove("HARVEST_URL").stdin(Stdio::null());
        command
    }

    /// Runs the CLI.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn harvest<Argument: AsRef<std::ffi::OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = Argument>,
    ) -> Ran {
        let output = self.command().args(arguments).output().expect("the CLI can be started");
        Ran {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// `harvest exec` of a shell script in a fresh sandbox of the tiny image.
    #[must_use]
    pub fn exec(&self, script: &str) -> Command {
        let mut command = self.command();
        command.args(FRESH).args(["--", "sh", "-c", script]);
        command
    }

    /// Runs a verb that must succeed with `--json` and parses its output.
    ///
    /// # Panics
    /// When it fails or prints something else.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let ran = self.harvest(arguments.iter().chain(&["--json"]));
        assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
        serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("not JSON: {ran:?}"))
    }

    /// Runs a verb that must succeed and returns its output without the newline.
    ///
    /// # Panics
    /// When it fails.
    pub fn line(&self, arguments: &[&str]) -> String {
        let ran = self.harvest(arguments);
        assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
        ran.stdout.trim_end().to_owned()
    }

    /// Creates a standalone sandbox.
    pub fn create(&self) -> String {
        self.line(&["sandbox", "create", "--image", "tiny", "--no-state"])
    }

    /// Runs a shell script in a sandbox and returns its output.
    pub fn shell(&self, sandbox: &str, script: &str) -> String {
        self.line(&["exec", sandbox, "--", "sh", "-c", script])
    }
}

impl Default for OfflineHome {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for OfflineHome {
    fn drop(&mut self) {
        let swept = self.command().args(["gc", "--all", "--yes"]).output();
        if std::thread::panicking() {
            eprintln!("--- gc\n{swept:?}");
        }
    }
}

fn write_image(image: &Path) {
    let root = image.join("root");
    for folder in ["bin", "etc", "tmp", "proc", "dev", "sys"] {
        fs::create_dir_all(root.join(folder)).expect("a temporary folder is ours");
    }
    fs::copy("/bin/busybox", root.join("bin/busybox"))
        .expect("a static /bin/busybox (busybox-static)");
    for applet in APPLETS.split_whitespace() {
        symlink("busybox", root.join("bin").join(applet)).expect("a temporary folder is ours");
    }
    // A real interpreter does not fit 2 MB; this stand-in prints its arguments.
    for program in ["bash", "node", "python3"] {
        let path = root.join("bin").join(program);
        fs::write(&path, format!("#!/bin/sh\necho {program} \"$2\"\ncat \"$1\"\n"))
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
            .expect("a temporary folder is ours");
    }
    let recipe =
        "name = \"tiny\"\nfrom = { folder = \"root\" }\n\n[[step]]\nenv = { PATH = \"/bin\" }\n";
    fs::write(image.join("tiny.toml"), recipe).expect("a temporary folder is ours");
}

/// Polls until there is a value.
///
/// # Panics
/// When it does not.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Running processes of this host, sandboxes included, with this argument on their command line.
#[must_use]
pub fn processes_with(word: &str) -> Vec<u32> {
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    numbers
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            *pid != std::process::id()
                && line.split(|byte| *byte == 0).any(|part| part == word.as_bytes())
        })
        .collect()
}

/// The peak resident memory of a process, in bytes.
#[must_use]
pub fn most_memory(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
}

/// The private memory of a process, in bytes.
#[must_use]
pub fn private_memory(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let lines = text.lines().filter(|line| line.starts_with("Private_"));
    let kilobytes: u64 =
        lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum();
    (kilobytes > 0).then_some(kilobytes << 10)
}
