//! A PostgreSQL server for tests, from Debian's programs, with its own folder and socket. Debian's
//! own cluster is not used. A test fails, rather than being skipped, when the programs are missing.
//!
//! All tests of one run share a server. The first one starts it together with a watcher process
//! that stops it and removes its folder when the test run has ended for any reason.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

// `initdb` writes about 40 MB, which takes a while on a busy machine.
const START_PATIENCE: Duration = Duration::from_secs(120);

// An unprivileged user: PostgreSQL refuses to run as root.
const UNPRIVILEGED: [&str; 3] = ["--reuid=65534", "--regid=65534", "--clear-groups"];

// Stops the server and removes its folder when the watched process has exited.
const WATCHER: &str = r#"
whom=$1 folder=$2; shift 2
"$@" &
server=$!
while kill -0 "$whom" 2>/dev/null && kill -0 "$server" 2>/dev/null; do sleep 0.5; done
kill -QUIT "$server" 2>/dev/null
wait "$server"
cd / && rm -rf "$folder"
"#;

/// A running server.
#[derive(Debug, Clone)]
pub struct Postgres {
    folder: PathBuf,
}

impl Postgres {
    /// The server of this test run.
    ///
    /// # Panics
    /// When PostgreSQL is not installed or does not start.
    #[must_use]
    pub fn shared() -> Self {
        // Nextest starts one process per test and outlives them all; otherwise this process is the
        // run.
        let (run, whom) = match std::env::var("NEXTEST_RUN_ID") {
            Ok(run) => (run, std::os::unix::process::parent_id()),
            Err(_) => (std::process::id().to_string(), std::process::id()),
        };
        let short = run.split('-').next().unwrap_or(&run);
        let folder = std::env::temp_dir().join(format!("harvest-pg-{short}"));
        // Tests kill processes but never cut the power.
        Self::start(&folder, whom, &["fsync=off"])
    }

    /// Whether PostgreSQL is installed.
    #[must_use]
    pub fn installed() -> bool {
        find("postgres").is_some()
    }

    /// Starts the server in `folder` with these settings until the process `whom` exits.
    ///
    /// # Panics
    /// When PostgreSQL is not installed or does not start.
    #[must_use]
    pub fn start(folder: &Path, whom: u32, settings: &[&str]) -> Self {
        let server = Self { folder: folder.to_owned() };
        fs::create_dir_all(folder).expect("the temporary folder can be written");
        let lock = File::create(folder.join("lock")).expect("our folder can be written");
        lock.lock().expect("a lock on a file of ours");
        if !folder.join("started").exists() {
            // An earlier process may have been killed during the start.
            if !folder.join("data/postmaster.pid").exists() {
                server.initialize();
                server.launch(whom, settings);
            }
            server.wait();
            fs::write(folder.join("started"), "").expect("our folder can be written");
        }
        server
    }

    fn initialize(&self) {
        fs::set_permissions(&self.folder, fs::Permissions::from_mode(0o755))
            .expect("the folder is ours");
        let data = self.folder.join("data");
        let _ = fs::remove_dir_all(&data);
        fs::create_dir(&data).expect("our folder can be written");
        if is_root() {
            for path in [&data, &self.folder] {
                std::os::unix::fs::chown(path, Some(65534), Some(65534))
                    .expect("root may give away");
            }
        }
        // A collation that differs from byte order, so that tests fail if code relies on byte
        // order.
        let order = ["--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en"];
        let options = ["--username=harvest", "--auth=trust", "--no-sync", "--encoding=UTF8"];
        let mut initdb = unprivileged(&program("initdb"));
        let made = initdb
            .arg("-D")
            .arg(&data)
            .args(options)
            .args(order)
            .current_dir("/")
            .output()
            .expect("initdb starts");
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
    }

    fn launch(&self, whom: u32, settings: &[&str]) {
        let log = File::create(self.folder.join("log")).expect("our folder can be written");
        let server = unprivileged(&program("postgres"));
        let mut watcher = Command::new("setsid");
        watcher
            .args(["--fork", "sh", "-c", WATCHER, "watcher", &whom.to_string()])
            .arg(&self.folder);
        watcher.arg(server.get_program()).args(server.get_args());
        watcher.arg("-D").arg(self.folder.join("data")).arg("-k").arg(&self.folder);
        // No TCP: access to the folder is access to the server.
        for setting in ["listen_addresses=", "max_connections=200"].iter().chain(settings) {
            watcher.args(["-c", setting]);
        }
        watcher.current_dir("/").stdin(Stdio::null());
        watcher.stdout(log.try_clone().expect("an open file")).stderr(log);
        assert!(watcher.status().expect("setsid starts").success());
    }

    fn wait(&self) {
        let begin = Instant::now();
        let ready = || {
            let mut ask = Command::new(program("pg_isready"));
            ask.arg("-q").arg("-h").arg(&self.folder).status().is_ok_and(|status| status.success())
        };
        while !ready() {
            let log = || fs::read_to_string(self.folder.join("log")).unwrap_or_default();
            assert!(begin.elapsed() < START_PATIENCE, "PostgreSQL does not start: {}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The folder with the socket.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Creates an empty database, dropped with the returned value.
    #[must_use]
    pub fn database(&self) -> Database {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("test_{}_{count}", std::process::id());
        self.sql("postgres", &format!("CREATE DATABASE {name}"));
        Database { server: self.clone(), name }
    }

    /// Runs SQL in a database and returns the output.
    ///
    /// # Panics
    /// When the server refuses.
    pub fn sql(&self, database: &str, sql: &str) -> String {
        let mut psql = Command::new(program("psql"));
        psql.args([
            "-X",
            "-A",
            "-t",
            "-q",
            "-v",
            "ON_ERROR_STOP=1",
            "-U",
            "harvest",
            "-d",
            database,
        ]);
        let ran = psql.arg("-h").arg(&self.folder).args(["-c", sql]).output().expect("psql starts");
        assert!(ran.status.success(), "{sql}: {}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8_lossy(&ran.stdout).trim().to_owned()
    }
}

/// A database for one test.
#[derive(Debug)]
pub struct Database {
    server: Postgres,
    name: String,
}

impl Database {
    /// The connection URL.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(&self.server.folder)
    }

    /// The connection URL through a socket in another folder.
    #[must_use]
    pub fn url_at(&self, folder: &Path) -> String {
        format!("postgres://harvest@localhost/{}?host={}", self.name, folder.display())
    }

    /// Runs SQL and returns the output.
    pub fn sql(&self, sql: &str) -> String {
        self.server.sql(&self.name, sql)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        self.server.sql("postgres", &format!("DROP DATABASE {} WITH (FORCE)", self.name));
    }
}

fn unprivileged(program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(UNPRIVILEGED).arg("--").arg(program);
    command
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

fn program(name: &str) -> PathBuf {
    find(name).expect("Debian's package `postgresql` is not installed; `make test` installs it")
}

/// A program of the newest installed PostgreSQL version.
fn find(name: &str) -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten().map(|entry| entry.path());
    let number = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let newest = versions.max_by_key(|path| number(path))?;
    Some(newest.join("bin").join(name)).filter(|path| path.exists())
}
