//! Layers and binds cannot be changed from inside.

use std::os::unix::fs::PermissionsExt;

use super::*;

/// Every name below a folder with its kind, mode, ids, link count, times and content, to detect
/// changes.
fn fingerprint(folder: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(path) = open.pop() {
        let about = fs::symlink_metadata(&path).unwrap();
        let content = if about.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
        let sum = content
            .iter()
            .fold(7u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
        lines.push(format!(
            "{} {:o} {}:{} {} {} {} {sum}",
            path.display(),
            about.mode(),
            about.uid(),
            about.gid(),
            about.nlink(),
            about.mtime_nsec(),
            about.ctime_nsec()
        ));
        if about.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    lines.sort();
    lines
}

// Every way to change a file as root inside: by name, through an earlier descriptor, a hard link,
// the descriptor's name, its mode, owner and times; then everything is removed.
const CHANGE_EVERYTHING: &str = "
    exec 5</etc/victim; echo x >> /proc/self/fd/5; exec 6<>/etc/victim; echo y >&6
    ln /etc/victim /etc/second; echo z >> /etc/second; mv /etc/second /etc/third
    chmod 777 /etc/victim; chown 7:7 /etc/victim; touch /etc/victim
    echo w > /bin/true; rm -rf /etc /root /bin/wc; mkdir /etc; echo mine > /etc/victim
    cat /etc/victim";

#[test]
fn layers_cannot_be_changed_from_inside() {
    let world = World::new();
    let layer = world.folder.path().join("cache/layers/base");
    fs::write(layer.join("etc/victim"), "untouched").unwrap();
    let before = fingerprint(&layer);
    let running = world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap();
    // A shared mapping, written to before anything else has copied the file up.
    let mapped = exec(&running, probe_command("map_victim", 1));
    assert_eq!(result_of(&mapped.out), Some(0), "{mapped:?}");
    assert!(shell(&running, "cat /etc/victim").out.starts_with('!'), "the file has changed inside");
    let output = shell(&running, CHANGE_EVERYTHING);
    assert!(output.out.ends_with("mine"), "{output:?}");
    assert_eq!(fingerprint(&layer), before);
    fs::write(layer.join("etc/victim"), "untouched ").unwrap();
    assert_ne!(fingerprint(&layer), before, "a change is detected");
}

/// Writes into a shared mapping of a file.
pub(super) fn map_victim() -> io::Result<()> {
    let file = fs::OpenOptions::new().read(true).write(true).open("/etc/victim")?;
    let (protection, number) =
        (libc::PROT_READ | libc::PROT_WRITE, std::os::fd::AsRawFd::as_raw_fd(&file));
    // SAFETY: the file has at least one byte, and nothing else in this process knows the mapping.
    unsafe {
        let mapped = libc::mmap(std::ptr::null_mut(), 1, protection, libc::MAP_SHARED, number, 0);
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        mapped.cast::<u8>().write(b'!');
        check(libc::msync(mapped, 1, libc::MS_SYNC).into())
    }
}

#[test]
fn binds_are_read_only() {
    let world = World::new();
    let bound = world.folder.path().join("bound");
    fs::create_dir(&bound).unwrap();
    fs::write(bound.join("file"), "ours").unwrap();
    // World-writable, so that only the mount blocks writes.
    for path in [&bound, &bound.join("file")] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let before = fingerprint(&bound);
    let bind = Bind { source: bound.clone(), inside: "/bound".into() };
    let running = world.engine.start(&Spec { binds: vec![bind], ..world.spec() }).unwrap();
    let tries =
        ["echo x > /bound/file", "touch /bound/new", "rm /bound/file", "ln /bound/file /bound/x"];
    for script in tries.into_iter().chain(["chmod 700 /bound", "cd /bound; echo x > ../bound/file"])
    {
        let output = shell(&running, script);
        assert_ne!(output.exit, Exit::Code(0), "{script}: {output:?}");
        assert!(output.err.contains("Read-only file system"), "{script}: {output:?}");
    }
    assert_eq!(shell(&running, "cat /bound/file").out, "ours");
    assert_eq!(fingerprint(&bound), before);
}

#[test]
fn generated_files_are_private_and_read_only() {
    let world = World::new();
    let running = world.start();
    for path in ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"] {
        let output = shell(&running, &format!("echo x >> {path}"));
        assert!(output.err.contains("Read-only file system"), "{path}: {output:?}");
        assert_ne!(shell(&running, &format!("rm {path}")).exit, Exit::Code(0), "{path}");
    }
}

#[test]
fn hostile_image_cannot_redirect_mounts() {
    let world = World::new();
    let base = world.folder.path().join("cache/layers/base");
    let outside = world.folder.path().join("outside");
    fs::write(&outside, "the host's").unwrap();
    // Targets of generated files: links to the outside, a chain with `..`, a pipe.
    symlink(&outside, base.join("etc/resolv.conf")).unwrap();
    symlink("/../../../../proc/self/root/etc/passwd", base.join("etc/hosts")).unwrap();
    let pipe = HostCommand::new("mkfifo").arg(base.join("etc/hostname")).status();
    assert!(pipe.unwrap().success());
    let running = world.start();
    assert!(shell(&running, "cat /etc/resolv.conf").out.contains("198.18.0.1"));
    assert!(shell(&running, "cat /etc/hosts").out.contains("localhost"));
    assert!(shell(&running, "cat /etc/hostname").out.starts_with("sbx-"));
    assert_eq!(fs::read_to_string(&outside).unwrap(), "the host's");
    // Targets of mounted folders: files in their place are refused, not replaced.
    for name in ["proc", "dev", "sys", "etc"] {
        let (world, file) =
            (World::new(), |world: &World| world.folder.path().join("cache/layers/base"));
        fs::remove_dir_all(file(&world).join(name)).unwrap();
        fs::write(file(&world).join(name), "").unwrap();
        assert!(
            matches!(world.engine.start(&world.spec()), Err(EngineError::Refused { .. })),
            "{name}"
        );
        assert!(world.engine.list().unwrap().is_empty());
    }
}

#[test]
fn linked_app_folder_is_not_followed() {
    for image in ["link", "file"] {
        let world = World::new();
        let base = world.folder.path().join("cache/layers/base");
        match image {
            "link" => symlink("/etc", base.join("app")).unwrap(),
            _ => fs::write(base.join("app"), "").unwrap(),
        }
        let spec = Spec { owner: Owner::Sessions, ..world.spec() };
        let running = world.engine.start(&spec).unwrap();
        let seen = shell(&running, "test -d /app && test ! -L /app && test -e /etc/hosts");
        assert_eq!(seen.exit, Exit::Code(0), "{image}: {seen:?}");
        let mounted = shell(&running, "grep -c ' /app tmpfs ro' /proc/mounts");
        assert_eq!(
            mounted.exit,
            Exit::Code(0),
            "{image}: {}",
            shell(&running, "cat /proc/mounts").out
        );
    }
}
