//! Imports of archives and folders, and the records of images.

use std::{fs, process::Command as HostCommand};

use harvest_images::{ImageError, Import, UnpackError, UnpackLimits};

use crate::world::{World, gzip, shell, tar};

#[test]
fn archive_is_imported_plain_or_compressed() {
    let world = World::new();
    let plain = world.archive();
    let first = world.import("plain", &plain).unwrap();
    let second = world.import("packed", &gzip(&plain)).unwrap();
    assert_eq!(first.layers, second.layers, "the same content is the same layer");
    assert_eq!(world.run_in("packed", "echo it runs"), "it runs");
    assert_eq!(world.unfinished(), [""; 0]);
}

#[test]
fn folder_is_imported_without_its_devices() {
    let world = World::new();
    let root = world.root();
    let make_device = |path: &str| {
        HostCommand::new("mknod").arg(root.join(path)).args(["c", "1", "3"]).status().unwrap()
    };
    assert!(make_device("dev/null").success());
    let import = || {
        let (from, limits) = (Import::Folder(&root), UnpackLimits::default());
        harvest_images::import(&world.engine, "folder", from, limits, &mut |_| {})
    };
    let image = import().unwrap();
    let layer = world.layer_path(&image, 0);
    assert!(layer.join("bin/busybox").exists() && !layer.join("dev/null").exists());
    assert!(make_device("etc/device").success());
    let refused = import();
    assert!(
        matches!(refused, Err(ImageError::Unpack { source: UnpackError::Device { .. }, .. })),
        "{refused:?}"
    );
    assert_eq!(world.engine.image("folder").unwrap(), Some(image));
}

#[test]
fn truncated_archive_keeps_the_old_image() {
    let world = World::new();
    let plain = world.archive();
    let image = world.import("kept", &plain).unwrap();
    let packed = gzip(&plain);
    for cut in [&plain[..plain.len() / 2], &packed[..packed.len() - 5], b"", &plain[512..2048]] {
        let refused = world.import("kept", cut);
        assert!(
            matches!(refused, Err(ImageError::Unpack { source: UnpackError::Archive(_), .. })),
            "{refused:?}"
        );
    }
    assert_eq!(world.engine.image("kept").unwrap(), Some(image));
    assert_eq!(world.unfinished(), [""; 0]);
}

#[test]
fn output_of_docker_save_is_refused() {
    let world = World::new();
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("manifest.json"), "[]").unwrap();
    let refused = world.import("saved", &tar(folder.path())).unwrap_err().to_string();
    assert!(refused.contains("is a saved image"), "{refused}");
    assert_eq!(world.unfinished(), [""; 0]);
}

#[test]
fn invalid_image_names_are_refused() {
    let world = World::new();
    for name in ["../evil", "a/b", "", "UPPER"] {
        let refused = world.import(name, &world.archive());
        assert!(matches!(refused, Err(ImageError::Invalid { .. })), "{name}");
    }
}

#[test]
fn users_of_an_image_are_listed() {
    let world = World::new();
    let image = world.import("one", &world.archive()).unwrap();
    world.import("two", &world.archive()).unwrap();
    let running = world.start("one");
    let users = world.engine.image_users(&image).unwrap();
    assert_eq!((users.images, users.sandboxes), (vec!["two".to_owned()], vec![running.id.clone()]));
    assert!(world.engine.image_layers(&image).unwrap()[0].1 > 1_000_000);
    // A running sandbox keeps its layers when the images are removed and collected.
    world.engine.image_remove("one").unwrap();
    world.engine.image_remove("two").unwrap();
    world.engine.gc(false).unwrap();
    assert_eq!(shell(&running, "echo on"), "on");
}
