//! Checks that a test leaves no processes, cgroups, mounts or sockets of its home behind.

use super::*;

impl World {
    /// Waits until nothing of this home is left outside its own folder.
    pub(super) fn assert_nothing_left(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let leftovers = self.leftovers();
            if leftovers.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "leftovers behind: {leftovers:#?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn leftovers(&self) -> Vec<String> {
        let mut leftovers: Vec<String> =
            self.zygotes().iter().map(|pid| format!("zygote {pid}")).collect();
        leftovers.extend(self.groups().iter().map(|group| format!("cgroup {}", group.display())));
        let paths =
            [self.folder.path(), &self.home].map(|path| path.to_string_lossy().into_owned());
        // A btrfs store is a mount of the host itself and is checked separately.
        let store = format!("{} ", self.home.join("store").display());
        let mentions_home =
            |line: &str| paths.iter().any(|path| line.contains(path)) && !line.contains(&store);
        for pid in processes() {
            // A process outside the host's mount namespace that has this home mounted.
            let mounts = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
            let table = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
            if mounts(&pid.to_string()) != mounts("self")
                && table.lines().any(mentions_home)
                && uid(pid).is_some()
            {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                leftovers.push(format!("process {pid} {}", String::from_utf8_lossy(&line)));
            }
        }
        let own = fs::read_to_string("/proc/self/mountinfo").unwrap();
        leftovers.extend(
            own.lines().filter(|line| mentions_home(line)).map(|line| format!("mount {line}")),
        );
        let run = fs::read_dir(self.home.join("run")).into_iter().flatten().flatten();
        // `ids` holds an unprivileged user's claims; it may be empty.
        let is_leftover = |path: &Path| path.is_dir() && !(path.ends_with("ids") && is_empty(path));
        leftovers.extend(
            run.map(|entry| entry.path())
                .filter(|path| is_leftover(path))
                .map(|path| format!("{path:?}")),
        );
        leftovers
    }
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}
