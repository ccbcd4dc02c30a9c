//! Detection and layout of cgroups, on artificial mount tables.

use super::{layout::set, *};

const V1: &str = "1 2 0:1 / /c/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
    1 2 0:1 / /c/memory rw - cgroup cgroup rw,memory\n\
    1 2 0:1 / /c/pids rw - cgroup cgroup rw,pids\n\
    1 2 0:1 / /c/freezer rw - cgroup cgroup rw,freezer\n\
    1 2 0:1 / /c/unified rw - cgroup2 cgroup2 rw\n";

#[test]
fn v2_mount_without_controllers_is_ignored() {
    let found = Hierarchy::from_mounts(V1, |_| "hugetlb".into()).unwrap();
    let Hierarchy::V1 { mounts } = found else { panic!("{found:?}") };
    assert_eq!(mounts["cpu"], Path::new("/c/cpu"));
}

#[test]
fn controllers_mounted_together_are_listed_once() {
    let together = V1.replace("rw,cpu,cpuacct", "rw,cpu,memory").replace("rw,memory", "rw,blkio");
    let found = Hierarchy::from_mounts(&together, |_| String::new()).unwrap();
    assert_eq!(found.mounts(), ["/c/cpu", "/c/freezer", "/c/pids"].map(Path::new));
}

#[test]
fn v2_with_memory_and_pids_is_preferred() {
    let found = Hierarchy::from_mounts(V1, |_| "cpu memory pids".into());
    assert_eq!(found, Some(Hierarchy::V2 { mount: "/c/unified".into() }));
}

#[test]
fn host_without_required_controller_is_refused() {
    let without = V1.replace("rw,pids", "rw,blkio");
    assert_eq!(Hierarchy::from_mounts(&without, |_| String::new()), None);
}

#[test]
fn memory_limit_is_set_on_work_only() {
    let limits =
        Limits { memory_bytes: 4096, cpu_millis_per_second: 500, pids: 7, ..Limits::default() };
    for (hierarchy, file) in [
        (Hierarchy::V2 { mount: "/c".into() }, "memory.max"),
        (Hierarchy::from_mounts(V1, |_| String::new()).unwrap(), "memory.limit_in_bytes"),
    ] {
        let make = hierarchy.groups("home", "part", &limits).make;
        let limited: Vec<_> = make
            .iter()
            .filter(|group| group.settings.contains(&set(file, 4096)))
            .map(|group| group.path.clone())
            .collect();
        assert_eq!(limited.len(), 1);
        assert!(limited[0].ends_with("home/part/work"), "{limited:?}");
    }
}

#[test]
fn v1_limits_socket_memory_separately() {
    let v1 = Hierarchy::from_mounts(V1, |_| String::new()).unwrap();
    let make = v1.groups("home", "part", &Limits::default()).make;
    let work = make.iter().find(|group| group.path.ends_with("memory/home/part/work")).unwrap();
    assert!(work.settings.iter().any(|setting| setting.file == "memory.kmem.tcp.limit_in_bytes"));
}

#[test]
fn parent_cgroups_are_removed_after_children() {
    for hierarchy in [
        Hierarchy::V2 { mount: "/c".into() },
        Hierarchy::from_mounts(V1, |_| String::new()).unwrap(),
    ] {
        let folders = hierarchy.folders("home", "part");
        for (number, folder) in folders.iter().enumerate() {
            assert!(
                folders[..number].iter().all(|earlier| !folder.starts_with(earlier)),
                "{folder:?}"
            );
        }
    }
}
