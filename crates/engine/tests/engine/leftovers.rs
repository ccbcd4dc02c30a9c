//! What must not be left when a test ends: anything of its home that nobody looks after.

use super::*;

impl World {
    /// Waits until nothing of this home is left outside its own folder, whatever happened in it.
    pub(super) fn assert_nothing_left(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let left = self.left();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "these are left: {left:#?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn left(&self) -> Vec<String> {
        let mut left: Vec<String> =
            self.zygotes().iter().map(|pid| format!("zygote {pid}")).collect();
        left.extend(self.groups().iter().map(|group| format!("cgroup {}", group.display())));
        let places =
            [self.folder.path(), &self.home].map(|place| place.to_string_lossy().into_owned());
        // A store on btrfs is a mount of the host's own; whether it goes is looked at by itself.
        let store = format!("{} ", self.home.join("store").display());
        let ours =
            |line: &str| places.iter().any(|place| line.contains(place)) && !line.contains(&store);
        for pid in processes() {
            // A process that has this home mounted, and is not in the host's own mount namespace.
            let mounts = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
            let table = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
            if mounts(&pid.to_string()) != mounts("self")
                && table.lines().any(ours)
                && uid(pid).is_some()
            {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                left.push(format!("process {pid} {}", String::from_utf8_lossy(&line)));
            }
        }
        let own = fs::read_to_string("/proc/self/mountinfo").unwrap();
        left.extend(own.lines().filter(|line| ours(line)).map(|line| format!("mount {line}")));
        let run = fs::read_dir(self.home.join("run")).into_iter().flatten().flatten();
        // `ids` holds an ordinary user's claims; it may be empty.
        let of_a_sandbox =
            |path: &Path| path.is_dir() && !(path.ends_with("ids") && is_empty(path));
        left.extend(
            run.map(|entry| entry.path())
                .filter(|path| of_a_sandbox(path))
                .map(|path| format!("{path:?}")),
        );
        left
    }
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}
