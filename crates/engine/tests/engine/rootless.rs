//! The engine of a user who is not root. Each test runs itself again as one: in a mount namespace where
//! `/etc` knows that user and gives them ids, under `harvest-zygote --enter`.

use std::sync::atomic::{AtomicU32, Ordering};

use harvest_engine::{BuildOptions, Recipe, Step};
use harvest_proto::SnapshotId;

use super::*;

// Set where a test runs as that user.
const INSIDE: &str = "HARVEST_TEST_ROOTLESS";

/// Tests of the engine that must pass for an ordinary user just as they are.
const THE_SAME: [&str; 24] = [
    "lives::a_command_runs_in_all_namespaces_and_sees_only_its_own_processes",
    "lives::a_fork_bomb_hurts_only_its_own_work",
    "lives::a_home_with_a_long_path_works",
    "door::a_name_is_reached_through_the_door_and_by_no_other_way",
    "lives::a_sandbox_that_died_while_no_zygote_looked_is_found_dead",
    "lives::a_start_that_fails_says_why_and_leaves_nothing",
    "lives::a_zygote_killed_at_any_moment_of_a_start_leaves_a_whole_sandbox_or_none",
    "lives::a_zygote_survives_clients_that_talk_nonsense_or_go_away",
    "lives::an_image_cannot_lead_the_set_up_out_of_its_root",
    "doctor::a_host_that_runs_sandboxes_is_found_fit_and_nothing_is_left_of_the_trials",
    "disks::a_sandbox_that_died_by_itself_leaves_its_disk",
    "disks::a_snapshot_holds_the_disk_of_its_moment",
    "disks::a_writer_stands_still_while_it_is_captured",
    "disks::an_image_is_built_once_and_then_taken_from_the_cache",
    "disks::collecting_takes_what_nothing_uses_and_leaves_what_runs",
    "limits::a_lifetime_survives_the_zygote_that_counted_it",
    "limits::a_sandbox_that_fills_its_disk_is_stopped_and_all_others_go_on",
    "limits::no_file_becomes_larger_than_the_disk_it_is_on",
    "volumes::a_read_only_volume_is_read_only_even_for_root",
    "volumes::a_snapshot_does_not_hold_what_is_in_a_volume",
    "volumes::a_volume_carries_neither_set_uid_programs_nor_devices",
    "volumes::a_volume_in_use_cannot_be_removed_and_a_removed_one_not_be_used",
    "volumes::what_one_run_leaves_in_its_state_the_next_one_finds",
    "upgrades::a_zygote_of_another_build_gives_way_once_it_has_nothing_to_look_after",
];

/// A user of this machine, for as long as one test runs.
struct User {
    folder: tempfile::TempDir,
    id: u32,
    /// The first of the ids they may give away.
    first: u32,
}

// Makes the user known where only this test sees it, then becomes them. Bind mounts, because the folder
// of what was built may be closed to others.
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
        // Different for tests that run at the same time, and not among the engine's own.
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

    /// Gives the user a cgroup of version 2 to divide, and has their programs start in one below it.
    fn has_cgroup(&self) -> Given {
        let given = Given(PathBuf::from(format!("/sys/fs/cgroup/hvtest-{}", self.id)));
        fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids").unwrap();
        fs::create_dir_all(given.0.join("app")).unwrap();
        for path in ["", "cgroup.procs", "cgroup.subtree_control", "app", "app/cgroup.procs"] {
            std::os::unix::fs::chown(given.0.join(path), Some(self.id), Some(self.id)).unwrap();
        }
        given
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

    /// Runs tests as this user and says how they went.
    fn runs(&self, tests: &[&str]) {
        let program = self.folder.path().join("bin/test");
        let mut arguments = vec![program.to_str().unwrap(), "--exact", "--nocapture"];
        arguments.extend(tests);
        let output = self.command(&format!("hvtest:{}:65536\n", self.first), &arguments);
        let said = String::from_utf8_lossy(&output.stdout);
        let all = format!("{} passed; 0 failed", tests.len());
        assert!(said.contains(&all), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
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

/// A cgroup that is gone when the test ends.
struct Given(PathBuf);

impl Drop for Given {
    fn drop(&mut self) {
        let below = fs::read_dir(&self.0).unwrap().flatten().map(|entry| entry.path());
        for folder in below.filter(|path| path.is_dir()).collect::<Vec<_>>() {
            let _ = fs::remove_dir(folder);
        }
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs `body` as an ordinary user, in the test of this name.
fn as_a_user(name: &str, body: impl FnOnce(&World)) {
    if std::env::var_os(INSIDE).is_some() {
        return body(&World::new());
    }
    User::new().runs(&[&format!("rootless::{name}")]);
}

fn user_command(user: &str, argv: &[&str]) -> Command {
    Command { user: Some(user.to_owned()), ..command(argv) }
}

#[test]
fn the_engines_rules_hold_for_an_ordinary_user() {
    User::new().runs(&THE_SAME);
}

#[test]
fn a_cgroup_the_user_was_given_keeps_the_limits() {
    let has = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    if std::env::var_os(INSIDE).is_some() {
        let world = World::new();
        let plan = world.engine.plan(&world.spec()).unwrap();
        assert!(plan.to_string().contains("memory.max"), "{plan}");
    } else if has.contains("memory") {
        let user = User::new();
        let given = user.has_cgroup();
        user.runs(&[
            "lives::a_fork_bomb_hurts_only_its_own_work",
            "lives::a_memory_hog_dies_alone_and_is_counted",
            "disks::a_writer_stands_still_while_it_is_captured",
            "rootless::a_cgroup_the_user_was_given_keeps_the_limits",
        ]);
        let left = fs::read_dir(&given.0).unwrap().flatten().filter(|entry| entry.path().is_dir());
        let left: Vec<String> = left.map(|entry| named(&entry.path())).collect();
        assert!(left.iter().all(|name| name == "app" || name == "harvest-others"), "{left:?}");
    }
    // Elsewhere nothing is handed down: the second kernel of the tests has it.
}

#[test]
fn ids_inside_are_the_images_and_on_disk_the_users_own() {
    as_a_user("ids_inside_are_the_images_and_on_disk_the_users_own", |world| {
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
fn a_command_that_hides_dies_with_its_time_limit() {
    as_a_user("a_command_that_hides_dies_with_its_time_limit", |world| {
        let running = world.start();
        let script = "(setsid sh -c '(sleep 4321 & sleep 4321) & sleep 4321' &) ; sleep 4321";
        let command =
            Command { timeout_millis: Some(700), ..user_command("10001", &["sh", "-c", script]) };
        assert_eq!(exec(&running, command).exit, Exit::Timeout);
        assert_eq!(shell(&running, "ps | grep -c 'sleep [4]'").out, "0");
    });
}

#[test]
fn a_sandbox_of_an_ordinary_user_reaches_nothing_of_the_host() {
    as_a_user("a_sandbox_of_an_ordinary_user_reaches_nothing_of_the_host", |world| {
        let spec = Spec { binds: probes::probe_binds(), ..world.spec() };
        let running = world.engine.start(&spec).unwrap();
        let bystander = Sleeper::new();
        let mut open = Vec::new();
        for probe in probes::all() {
            let said = exec(&running, probes::probe_command(probe.name, bystander.0.id()));
            match probes::result_of(&said.out) {
                Some(0) => open.push(probe.name),
                Some(_) => {}
                None => panic!("{}: {said:?}", probe.name),
            }
        }
        // Root inside is the user, to whom what `/proc` shows of pid 1 belongs: that much, and no more.
        assert_eq!(open, ["oom_score_of_pid_1"]);
        for path in ["/proc/1/fd/0", "/proc/1/fd/3", "/proc/1/exe", "/proc/1/cwd"] {
            assert_ne!(shell(&running, &format!("readlink {path}")).exit, Exit::Code(0), "{path}");
        }
        assert_ne!(shell(&running, "cat /proc/1/environ").exit, Exit::Code(0));
        assert_eq!(
            shell(&running, "readlink /proc/$$/fd/0").exit,
            Exit::Code(0),
            "where nothing guards"
        );
    });
}

#[test]
fn processes_are_limited_whatever_users_they_belong_to() {
    as_a_user("processes_are_limited_whatever_users_they_belong_to", |world| {
        let limits = Limits { pids: 40, ..Limits::default() };
        let running = world.engine.start(&Spec { limits, ..world.spec() }).unwrap();
        // Ours and nobody else's: every process of the machine is looked at.
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
        let one = sleepers();
        assert!(one > 20 && one <= 40, "{one}");
        for user in ["2", "3", "4", "5"] {
            let command = user_command(user, &["sh", "-c", script]);
            // At last not even the shell can be started.
            let _ = Guest::dial(&running.bridge).unwrap().exec(command, &[], &mut |_, _| {});
        }
        // Besides the commands' own there is room for pid 1's.
        assert!(sleepers() <= 40 + 64, "{}", sleepers());
        // Another sandbox of the same user has the whole of its own limit.
        let other = world.start();
        assert_eq!(shell(&other, "sleep 4322 & sleep 4322 & echo fine").out, "fine");
    });
}

#[test]
fn one_sandbox_does_not_take_all_the_user_may_watch() {
    as_a_user("one_sandbox_does_not_take_all_the_user_may_watch", |world| {
        let spec = || Spec { binds: probes::probe_binds(), ..world.spec() };
        let sandboxes = [(); 2].map(|()| world.engine.start(&spec()).unwrap());
        // Each holds what it took until it is killed.
        let [first, second] = sandboxes.each_ref().map(|running| {
            let mut taker = probes::probe_command("watcher", 1);
            taker.argv[2] = "rootless::a_watcher".to_owned();
            let mut guest = Guest::dial(&running.bridge).unwrap();
            let (send, taken) = std::sync::mpsc::channel();
            thread::spawn(move || {
                let mut said = String::new();
                let _ = guest.exec(taker, &[], &mut |_, bytes| {
                    said.push_str(&String::from_utf8_lossy(bytes));
                    let line =
                        said.lines().find_map(|line| line.strip_prefix("took ")?.strip_suffix('.'));
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

/// Not a test but a role: takes as many watchers as it gets and holds them.
#[test]
fn a_watcher() {
    if std::env::var("HARVEST_PROBE").is_ok_and(|probe| probe == "watcher") {
        // SAFETY: takes a number only; the descriptors it makes are held until the process is killed.
        let count =
            (0..).take_while(|_| unsafe { libc::inotify_init1(libc::IN_CLOEXEC) } >= 0).count();
        println!("\ntook {count}.");
        thread::sleep(Duration::from_secs(600));
    }
}

#[test]
fn what_was_removed_stays_removed_in_snapshots() {
    as_a_user("what_was_removed_stays_removed_in_snapshots", |world| {
        let running = world.start();
        shell(
            &running,
            "mkdir /etc/x; echo 1 > /etc/x/one; chown 10001:10001 /etc/x/one; rm /bin/wc",
        );
        let live = SnapshotId::random();
        world.engine.capture(&running.id, &live).unwrap();
        // Gone and there again: what lies below in the stack must not show through.
        shell(&running, "rm -r /etc/x /bin; mkdir /etc/x");
        let last = SnapshotId::random();
        world.engine.end_kept(&running.id, &last).unwrap();
        let from = |snapshot| Spec { from: Origin::Snapshot(snapshot), ..world.spec() };
        let first = world.engine.start(&from(live)).unwrap();
        assert_eq!(shell(&first, "ls /bin/wc; ls -n /etc/x | grep -c 10001").out, "1");
        // Captured again on top of a snapshot, with a folder that hides another of the same name.
        shell(&first, "rm -r /etc/x; mkdir /etc/x; touch /etc/x/two");
        let two = world.home.join("sandboxes").join(first.id.part()).join("upper/etc/x/two");
        let age = || fs::metadata(&two).unwrap().modified().unwrap().elapsed().unwrap_or_default();
        eventually("its times can be trusted", || age() > Duration::from_millis(100));
        let again = SnapshotId::random();
        world.engine.capture(&first.id, &again).unwrap();
        let second = world.engine.start(&from(again)).unwrap();
        assert_eq!(shell(&second, "ls /etc/x").out, "two");
        // And again: the copy of such a folder must not hide its own earlier copy.
        shell(&first, "touch /etc/x/three");
        let grown = SnapshotId::random();
        world.engine.capture(&first.id, &grown).unwrap();
        let third = world.engine.start(&from(grown)).unwrap();
        assert_eq!(shell(&third, "ls /etc/x").out, "three\ntwo");
        assert_eq!(world.engine.snapshot(&last).unwrap().unwrap().layers.len(), 2);
    });
}

#[test]
fn a_frozen_sandbox_stands_still_and_goes_on() {
    as_a_user("a_frozen_sandbox_stands_still_and_goes_on", |world| {
        let running = world.start();
        shell(
            &running,
            "(setsid sh -c 'while :; do echo x >> /tmp/grows; done' >/dev/null 2>&1 &); true",
        );
        let file = world.home.join("sandboxes").join(running.id.part()).join("upper/tmp/grows");
        let size = || fs::metadata(&file).map_or(0, |about| about.len());
        eventually("it grows", || size() > 0);
        world.engine.freeze(&running.id).unwrap();
        let frozen = size();
        for _ in 0..20 {
            world.engine.freeze(&running.id).unwrap();
            assert_eq!(size(), frozen);
        }
        world.engine.thaw(&running.id).unwrap();
        eventually("it goes on", || size() > frozen);
        world.engine.freeze(&running.id).unwrap();
        let frozen = size();
        eventually("the freeze ends by itself", || size() > frozen);
        world.engine.freeze(&running.id).unwrap();
        world.engine.remove(&running.id).unwrap();
    });
}

#[test]
fn the_next_zygote_looks_after_what_a_killed_one_left() {
    as_a_user("the_next_zygote_looks_after_what_a_killed_one_left", |world| {
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
fn a_store_of_root_and_one_of_a_user_are_told_apart() {
    const NAME: &str = "a_store_of_root_and_one_of_a_user_are_told_apart";
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
        assert!(reason.contains("root made it") && reason.contains("HARVEST_HOME"), "{reason}");
        Engine::open(config(&folder)).unwrap();
        Engine::open(config(&folder)).unwrap();
        return;
    }
    let user = User::new();
    let of_root = user.folder.path().join("of-root");
    Engine::open(config(&of_root)).unwrap();
    let all = [format!("{}:{}", user.id, user.id), of_root.to_string_lossy().into_owned()];
    assert!(HostCommand::new("chown").arg("-R").args(all).status().unwrap().success());
    user.runs(&[&format!("rootless::{NAME}")]);
    let error = Engine::open(config(user.folder.path())).unwrap_err();
    let reason = std::error::Error::source(&error).unwrap().to_string();
    assert!(reason.contains("an ordinary user made it"), "{reason}");
}

#[test]
fn a_user_without_ids_is_told_what_to_do() {
    let user = User::new();
    for ids in ["", "hvtest:1000000000:1000\n", "somebody:1000000000:65536\n"] {
        fs::remove_dir_all(user.folder.path().join("bin")).ok();
        fs::remove_dir_all(user.folder.path().join("etc")).ok();
        let output = user.command(ids, &["true"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(said.contains("/etc/subuid gives the user `hvtest` no range"), "{said}");
        assert!(said.contains("usermod --add-subuids"), "{said}");
    }
}

#[test]
fn an_ordinary_user_builds_an_image_and_its_owners_are_kept() {
    as_a_user("an_ordinary_user_builds_an_image_and_its_owners_are_kept", |world| {
        let folder = world.folder.path().join("recipe");
        fs::create_dir(&folder).unwrap();
        symlink(world.folder.path().join("cache/layers/base"), folder.join("tree")).unwrap();
        let text = "name = \"small\"\nfrom = { folder = \"tree\" }\n[[step]]\nenv = { PATH = \"/bin\" }\n\
            [[step]]\nrun = \"mkdir /home; touch /home/file; chown 10001:5 /home/file; rm /bin/wc\"\n";
        let recipe = Recipe::parse(text, &folder).unwrap();
        let image =
            world.engine.image_build(&recipe, BuildOptions::default(), &mut |_| {}).unwrap();
        assert_eq!(image.layers.len(), 2);
        let running =
            world.engine.start(&Spec { from: Origin::Image("small".to_owned()), ..world.spec() });
        let said = shell(
            &running.unwrap(),
            "ls -n /home/file | grep -c '10001 *5 '; ls /bin | grep -c '^wc$'",
        );
        assert_eq!(said.out, "1\n0");
    });
}
