//! Tests of the engine for an unprivileged user. Each test runs itself again as such a user: in a
//! mount namespace whose `/etc` contains the user and its ids, under `harvest-zygote --enter`.

use std::sync::atomic::{AtomicU32, Ordering};

use harvest_engine::Step;
use harvest_proto::SnapshotId;

use super::*;

// Set while a test runs as that user.
const INSIDE: &str = "HARVEST_TEST_ROOTLESS";

/// Tests of the engine that must pass unchanged for an unprivileged user.
const UNCHANGED_TESTS: [&str; 25] = [
    "lifecycle::command_runs_in_private_namespaces",
    "lifecycle::fork_bomb_hits_only_its_own_limit",
    "lifecycle::home_with_long_path_works",
    "door::names_are_reachable_only_through_the_door",
    "lifecycle::sandbox_that_died_without_zygote_is_dead",
    "lifecycle::failed_start_reports_why_and_leaves_nothing",
    "lifecycle::zygote_killed_during_start_leaves_no_partial_sandbox",
    "lifecycle::zygote_survives_broken_clients",
    "lifecycle::image_links_cannot_escape_the_root",
    "doctor::capable_host_passes_and_probes_leave_nothing",
    "disks::a_dead_sandboxs_disk_can_be_saved",
    "disks::each_snapshot_has_the_disk_of_its_time",
    "disks::a_capture_freezes_the_writer",
    "disks::changes_of_a_sandbox_become_an_image_layer",
    "disks::gc_removes_unused_layers_but_not_running_ones",
    "limits::lifetime_survives_a_zygote_restart",
    "limits::disk_limit_kills_only_the_sandbox_over_it",
    "limits::file_cannot_exceed_the_disk_limit",
    "volumes::read_only_volumes_refuse_writes_by_root",
    "volumes::snapshots_do_not_include_volumes",
    "volumes::volumes_are_mounted_nosuid_and_nodev",
    "volumes::a_volume_in_use_cannot_be_removed",
    "volumes::state_persists_between_runs",
    "upgrades::idle_zygote_of_another_build_is_replaced",
    "probes::debuggers::debuggers_reach_only_processes_of_their_user",
];

/// A user of the host, for the duration of one test.
struct User {
    folder: tempfile::TempDir,
    id: u32,
    /// The first of the user's subordinate ids.
    first: u32,
}

// Adds the user where only this test sees it, then runs as that user. Bind mounts, because other
// users may not be able to enter the build folder.
const BECOME: &str = r#"
set -e
mount --make-rprivate /
mkdir "$F/etc" "$F/bin" && mount -t tmpfs none "$F/etc" && mkdir "$F/etc/upper" "$F/etc/work"
mount -t overlay none -o "lowerdir=/etc,upperdir=$F/etc/upper,workdir=$F/etc/work" /etc
echo "hvtest:x:$ID:$ID::$F:/bin/sh" >> /etc/passwd
printf "$IDS" > /etc/subuid
printf "$IDS" > /etc/subgid
for name in test zygote supervisor; do touch "$F/bin/$name"; done
mount --bind "$TEST" "$F/bin/test"
mount --bind "$ZYGOTE" "$F/bin/zygote"
mount --bind "$SUPERVISOR" "$F/bin/supervisor"
ln -s zygote "$F/bin/harvest-zygote"
cd "$F"
[ ! -d "/sys/fs/cgroup/hvtest-$ID" ] || echo $$ > "/sys/fs/cgroup/hvtest-$ID/app/cgroup.procs"
export HARVEST_TEST_ZYGOTE="$F/bin/harvest-zygote" HARVEST_SUPERVISOR="$F/bin/supervisor" TMPDIR="$F/tmp" HOME="$F"
exec setpriv --reuid="$ID" --regid="$ID" --clear-groups "$F/bin/zygote" --enter "$@"
"#;

impl User {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Different for concurrent tests, and outside the engine's own ranges.
        static USERS: AtomicU32 = AtomicU32::new(0);
        let number = (std::process::id() + USERS.fetch_add(1, Ordering::Relaxed) * 937) % 12_000;
        let user = Self { folder, id: 50_000 + number, first: 1_000_000_000 + number * 65_536 };
        fs::create_dir(user.folder.path().join("tmp")).unwrap();
        for path in ["", "tmp"] {
            let path = user.folder.path().join(path);
            std::os::unix::fs::chown(path, Some(user.id), Some(user.id)).unwrap();
        }
        user
    }

    /// Delegates a v2 cgroup to the user and starts their programs in one below it.
    fn delegate_cgroup(&self) -> DelegatedCgroup {
        let cgroup = DelegatedCgroup(PathBuf::from(format!("/sys/fs/cgroup/hvtest-{}", self.id)));
        fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids").unwrap();
        fs::create_dir_all(cgroup.0.join("app")).unwrap();
        for path in ["", "cgroup.procs", "cgroup.subtree_control", "app", "app/cgroup.procs"] {
            std::os::unix::fs::chown(cgroup.0.join(path), Some(self.id), Some(self.id)).unwrap();
        }
        cgroup
    }

    fn command(&self, ids: &str, arguments: &[&str]) -> std::process::Output {
        let supervisor = std::env::var_os("HARVEST_SUPERVISOR").unwrap();
        HostCommand::new("unshare")
            .args(["--mount", "sh", "-c", BECOME, "become"])
            .args(arguments)
            .env("F", self.folder.path())
            .env("ID", self.id.to_string())
            .env("IDS", ids)
            .env("TEST", std::env::current_exe().unwrap())
            .env("ZYGOTE", env!("CARGO_BIN_EXE_harvest-zygote"))
            .env("SUPERVISOR", fs::canonicalize(supervisor).unwrap())
            .env(INSIDE, self.first.to_string())
            .output()
            .unwrap()
    }

    /// Runs tests as this user and asserts that they pass.
    fn run_tests(&self, tests: &[&str]) {
        let program = self.folder.path().join("bin/test");
        let mut arguments = vec![program.to_str().unwrap(), "--exact", "--nocapture"];
        arguments.extend(tests);
        let output = self.command(&format!("hvtest:{}:65536\n", self.first), &arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        let all = format!("{} passed; 0 failed", tests.len());
        assert!(text.contains(&all), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        let uids = [self.id / 65_536, self.first / 65_536];
        let left: Vec<u32> = processes()
            .into_iter()
            .filter(|pid| uid(*pid).is_some_and(|id| self.has(id)))
            .collect();
        assert!(left.is_empty(), "{left:?} {uids:?}");
    }

    fn has(&self, id: u32) -> bool {
        id == self.id || (self.first..self.first + 65_536).contains(&id)
    }
}

/// A delegated cgroup, removed when dropped.
struct DelegatedCgroup(PathBuf);

impl Drop for DelegatedCgroup {
    fn drop(&mut self) {
        let below = fs::read_dir(&self.0).unwrap().flatten().map(|entry| entry.path());
        for folder in below.filter(|path| path.is_dir()).collect::<Vec<_>>() {
            let _ = fs::remove_dir(folder);
        }
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs `body` as an unprivileged user, in the test of this name.
fn as_unprivileged_user(name: &str, body: impl FnOnce(&World)) {
    if std::env::var_os(INSIDE).is_some() {
        return body(&World::new());
    }
    User::new().run_tests(&[&format!("rootless::{name}")]);
}

fn user_command(user: &str, argv: &[&str]) -> Command {
    Command { user: Some(user.to_owned()), ..command(argv) }
}

#[test]
fn engine_tests_pass_for_unprivileged_user() {
    User::new().run_tests(&UNCHANGED_TESTS);
}

#[test]
fn delegated_cgroup_enforces_limits() {
    let has = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    if std::env::var_os(INSIDE).is_some() {
        let world = World::new();
        let plan = world.engine.plan(&world.spec()).unwrap();
        assert!(plan.to_string().contains("memory.max"), "{plan}");
    } else if has.contains("memory") {
        let user = User::new();
        let cgroup = user.delegate_cgroup();
        user.run_tests(&[
            "lifecycle::fork_bomb_hits_only_its_own_limit",
            "lifecycle::memory_hog_is_killed_alone_and_counted",
            "disks::a_capture_freezes_the_writer",
            "rootless::delegated_cgroup_enforces_limits",
        ]);
        let left = fs::read_dir(&cgroup.0).unwrap().flatten().filter(|entry| entry.path().is_dir());
        let left: Vec<String> = left.map(|entry| named(&entry.path())).collect();
        assert!(left.iter().all(|name| name == "app" || name == "harvest-others"), "{left:?}");
    }
    // Without v2 delegation there is nothing to test; the second kernel of the tests has it.
}

#[test]
fn ids_inside_map_to_the_users_own() {
    as_unprivileged_user("ids_inside_map_to_the_users_own", |world| {
        let running = world.start();
        assert_eq!(exec(&running, user_command("root", &["id", "-u"])).out, "0");
        assert_eq!(exec(&running, user_command("10001", &["id", "-u"])).out, "10001");
        shell(&running, "touch /root/mine /tmp/theirs && chown 10001:10001 /tmp/theirs");
        let upper = world.home.join("sandboxes").join(running.id.part()).join("upper");
        for (path, id) in [("root/mine", 0), ("tmp/theirs", 10_001)] {
            let about = fs::metadata(upper.join(path)).unwrap();
            assert_eq!((about.uid(), about.gid()), (id, id), "{path}");
        }
        let plan = world.engine.plan(&world.spec()).unwrap();
        assert!(
            plan.steps.iter().any(|step| matches!(step, Step::ShareIds { count: 65_536, .. })),
            "{plan}"
        );
    });
}

#[test]
fn timeout_kills_detached_processes() {
    as_unprivileged_user("timeout_kills_detached_processes", |world| {
        let running = world.start();
        let script = "(setsid sh -c '(sleep 4321 & sleep 4321) & sleep 4321' &) ; sleep 4321";
        let command =
            Command { timeout_millis: Some(700), ..user_command("10001", &["sh", "-c", script]) };
        assert_eq!(exec(&running, command).exit, Exit::Timeout);
        assert_eq!(shell(&running, "ps | grep -c 'sleep [4]'").out, "0");
    });
}

#[test]
fn rootless_sandbox_cannot_reach_the_host() {
    as_unprivileged_user("rootless_sandbox_cannot_reach_the_host", |world| {
        let spec = Spec { binds: probes::probe_binds(), ..world.spec() };
        let running = world.engine.start(&spec).unwrap();
        let unrelated = Sleeper::new();
        let mut open = Vec::new();
        for probe in probes::all() {
            let output = exec(&running, probes::probe_command(probe.name, unrelated.0.id()));
            match probes::result_of(&output.out) {
                Some(0) => open.push(probe.name),
                Some(_) => {}
                None => panic!("{}: {output:?}", probe.name),
            }
        }
        // Root inside is the user, who owns pid 1's files in `/proc`: only this one is writable.
        assert_eq!(open, ["oom_score_of_pid_1"]);
        for path in ["/proc/1/fd/0", "/proc/1/fd/3", "/proc/1/exe", "/proc/1/cwd"] {
            assert_ne!(shell(&running, &format!("readlink {path}")).exit, Exit::Code(0), "{path}");
        }
        assert_ne!(shell(&running, "cat /proc/1/environ").exit, Exit::Code(0));
        assert_eq!(
            shell(&running, "readlink /proc/$$/fd/0").exit,
            Exit::Code(0),
            "unguarded processes are readable"
        );
    });
}

#[test]
fn process_limit_spans_all_users_inside() {
    as_unprivileged_user("process_limit_spans_all_users_inside", |world| {
        let limits = Limits { pids: 40, ..Limits::default() };
        let running = world.engine.start(&Spec { limits, ..world.spec() }).unwrap();
        // Unique to this test, because all processes of the host are searched.
        let mark = 1_000_000 + std::process::id();
        let script = &format!("i=0; while [ $i -lt 60 ]; do i=$((i+1)); sleep {mark} & done; true");
        let sleepers = || {
            let entries = processes().into_iter();
            let is = |pid: &u32| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line == format!("sleep\0{mark}\0").as_bytes()
            };
            entries.filter(is).count()
        };
        exec(&running, user_command("1", &["sh", "-c", script]));
        // A child is counted once it runs `sleep`, which may be after its shell ended.
        eventually("one user's processes", || sleepers() > 20);
        assert!(sleepers() <= 40, "{}", sleepers());
        for user in ["2", "3", "4", "5"] {
            let command = user_command(user, &["sh", "-c", script]);
            // In the end not even the shell can be started.
            let _ =
                SupervisorClient::dial(&running.bridge).unwrap().exec(command, &[], &mut |_, _| {});
        }
        // Pid 1 has its own allowance besides the commands' limit.
        assert!(sleepers() <= 40 + 64, "{}", sleepers());
        // Another sandbox of the same user has its full limit.
        let other = world.start();
        assert_eq!(shell(&other, "sleep 4322 & sleep 4322 & echo fine").out, "fine");
    });
}

#[test]
fn sandbox_cannot_exhaust_the_users_inotify_limit() {
    as_unprivileged_user("sandbox_cannot_exhaust_the_users_inotify_limit", |world| {
        let spec = || Spec { binds: probes::probe_binds(), ..world.spec() };
        let sandboxes = [(); 2].map(|()| world.engine.start(&spec()).unwrap());
        // Each process keeps its instances until it is killed.
        let [first, second] = sandboxes.each_ref().map(|running| {
            let mut taker = probes::probe_command("watcher", 1);
            taker.argv[2] = "rootless::inotify_taker_process".to_owned();
            let mut client = SupervisorClient::dial(&running.bridge).unwrap();
            let (send, taken) = std::sync::mpsc::channel();
            thread::spawn(move || {
                let mut output = String::new();
                let _ = client.exec(taker, &[], &mut |_, bytes| {
                    output.push_str(&String::from_utf8_lossy(bytes));
                    let line = output
                        .lines()
                        .find_map(|line| line.strip_prefix("took ")?.strip_suffix('.'));
                    if let Some(count) = line {
                        let _ = send.send(count.parse::<u32>().unwrap());
                    }
                });
            });
            taken.recv_timeout(Duration::from_secs(60)).unwrap()
        });
        assert!(first > 0 && first == second, "{first} {second}");
    });
}

/// Not a test: takes as many inotify instances as it gets and keeps them.
#[test]
fn inotify_taker_process() {
    if std::env::var("HARVEST_PROBE").is_ok_and(|probe| probe == "watcher") {
        // SAFETY: takes an integer only; the descriptors stay open until the process is killed.
        let count =
            (0..).take_while(|_| unsafe { libc::inotify_init1(libc::IN_CLOEXEC) } >= 0).count();
        println!("\ntook {count}.");
        thread::sleep(Duration::from_secs(600));
    }
}

#[test]
fn removed_files_stay_removed_in_snapshots() {
    as_unprivileged_user("removed_files_stay_removed_in_snapshots", |world| {
        let running = world.start();
        shell(
            &running,
            "mkdir /etc/x; echo 1 > /etc/x/one; chown 10001:10001 /etc/x/one; rm /bin/wc",
        );
        let live = SnapshotId::random();
        world.engine.capture(&running.id, &live).unwrap();
        // Removed and created again: lower layers must not show through.
        shell(&running, "rm -r /etc/x /bin; mkdir /etc/x");
        let last = SnapshotId::random();
        world.engine.stop_and_save(&running.id, &last).unwrap();
        let from = |snapshot| Spec { from: Origin::Snapshot(snapshot), ..world.spec() };
        let first = world.engine.start(&from(live)).unwrap();
        assert_eq!(shell(&first, "ls /bin/wc; ls -n /etc/x | grep -c 10001").out, "1");
        // Captured again on top of a snapshot, with a folder that hides a lower one of the same
        // name.
        shell(&first, "rm -r /etc/x; mkdir /etc/x; touch /etc/x/two");
        let two = world.home.join("sandboxes").join(first.id.part()).join("upper/etc/x/two");
        let age = || fs::metadata(&two).unwrap().modified().unwrap().elapsed().unwrap_or_default();
        eventually("its timestamps to be old enough", || age() > Duration::from_millis(100));
        let again = SnapshotId::random();
        world.engine.capture(&first.id, &again).unwrap();
        let second = world.engine.start(&from(again)).unwrap();
        assert_eq!(shell(&second, "ls /etc/x").out, "two");
        // Once more: the copy of such a folder must not hide its own earlier copy.
        shell(&first, "touch /etc/x/three");
        let grown = SnapshotId::random();
        world.engine.capture(&first.id, &grown).unwrap();
        let third = world.engine.start(&from(grown)).unwrap();
        assert_eq!(shell(&third, "ls /etc/x").out, "three\ntwo");
        assert_eq!(world.engine.snapshot(&last).unwrap().unwrap().layers.len(), 2);
    });
}

#[test]
fn freeze_and_thaw_work_without_cgroups() {
    as_unprivileged_user("freeze_and_thaw_work_without_cgroups", |world| {
        let running = world.start();
        shell(
            &running,
            "(setsid sh -c 'while :; do echo x >> /tmp/grows; done' >/dev/null 2>&1 &); true",
        );
        let file = world.home.join("sandboxes").join(running.id.part()).join("upper/tmp/grows");
        let size = || fs::metadata(&file).map_or(0, |about| about.len());
        eventually("the file to grow", || size() > 0);
        world.engine.freeze(&running.id).unwrap();
        let frozen = size();
        for _ in 0..20 {
            world.engine.freeze(&running.id).unwrap();
            assert_eq!(size(), frozen);
        }
        world.engine.thaw(&running.id).unwrap();
        eventually("the thaw", || size() > frozen);
        world.engine.freeze(&running.id).unwrap();
        let frozen = size();
        eventually("the freeze to expire", || size() > frozen);
        world.engine.freeze(&running.id).unwrap();
        world.engine.remove(&running.id).unwrap();
    });
}

#[test]
fn next_zygote_adopts_rootless_sandboxes() {
    as_unprivileged_user("next_zygote_adopts_rootless_sandboxes", |world| {
        let running = world.start();
        shell(&running, "(setsid sleep 1000 >/dev/null 2>&1 &); true");
        for pid in world.zygotes() {
            HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
        }
        assert_eq!(shell(&running, "echo on").out, "on");
        assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Running(running.clone()));
        world.engine.capture(&running.id, &SnapshotId::random()).unwrap();
        world.engine.kill(&running.id).unwrap();
        assert_eq!(world.engine.wait(&running.id).unwrap(), "killed");
        world.engine.remove(&running.id).unwrap();
        assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
        world.engine.gc(false).unwrap();
        for folder in ["sandboxes", "trash", "run"] {
            let names: Vec<String> = fs::read_dir(world.home.join(folder))
                .unwrap()
                .map(|entry| named(&entry.unwrap().path()))
                .filter(|name| !name.starts_with("zygote"))
                .collect();
            assert!(names.is_empty(), "{folder}: {names:?}");
        }
    });
}

#[test]
fn root_and_user_stores_are_kept_apart() {
    const NAME: &str = "root_and_user_stores_are_kept_apart";
    let config = |folder: &Path| Config {
        home: folder.join("home"),
        cache: folder.join("cache"),
        supervisor: PathBuf::new(),
        zygote: Vec::new(),
        driver: Driver::Dir,
        thresholds: Thresholds::NONE,
    };
    if std::env::var_os(INSIDE).is_some() {
        let folder = PathBuf::from(std::env::var_os("HOME").unwrap());
        let error = Engine::open(config(&folder.join("of-root"))).unwrap_err();
        let reason = std::error::Error::source(&error).unwrap().to_string();
        assert!(reason.contains("root created it") && reason.contains("HARVEST_HOME"), "{reason}");
        Engine::open(config(&folder)).unwrap();
        Engine::open(config(&folder)).unwrap();
        return;
    }
    let user = User::new();
    let of_root = user.folder.path().join("of-root");
    Engine::open(config(&of_root)).unwrap();
    let all = [format!("{}:{}", user.id, user.id), of_root.to_string_lossy().into_owned()];
    assert!(HostCommand::new("chown").arg("-R").args(all).status().unwrap().success());
    user.run_tests(&[&format!("rootless::{NAME}")]);
    let error = Engine::open(config(user.folder.path())).unwrap_err();
    let reason = std::error::Error::source(&error).unwrap().to_string();
    assert!(reason.contains("an unprivileged user created it"), "{reason}");
}

#[test]
fn missing_subordinate_ids_are_explained() {
    let user = User::new();
    for ids in ["", "hvtest:1000000000:1000\n", "somebody:1000000000:65536\n"] {
        fs::remove_dir_all(user.folder.path().join("bin")).ok();
        fs::remove_dir_all(user.folder.path().join("etc")).ok();
        let output = user.command(ids, &["true"]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(text.contains("user `hvtest` has no range of 65,535 ids"), "{text}");
        assert!(text.contains("usermod --add-subuids"), "{text}");
    }
}

#[test]
fn rootless_build_keeps_file_owners() {
    as_unprivileged_user("rootless_build_keeps_file_owners", |world| {
        let script = "mkdir /home; touch /home/file; chown 10001:5 /home/file; rm /bin/wc";
        let image = world.make_image("small", &[script]);
        assert_eq!(image.layers.len(), 2);
        let running =
            world.engine.start(&Spec { from: Origin::Image("small".to_owned()), ..world.spec() });
        let output = shell(
            &running.unwrap(),
            "ls -n /home/file | grep -c '10001 *5 '; ls /bin | grep -c '^wc$'",
        );
        assert_eq!(output.out, "1\n0");
    });
}
