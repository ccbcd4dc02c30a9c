//! Images from archives, folders and registries, and what happens to builds when things go wrong.

#[path = "images/fake.rs"]
mod fake;
#[path = "images/faults.rs"]
mod faults;
#[path = "images/pulls.rs"]
mod pulls;

use harvest_engine::{
    BuildOptions, Image, Import, Progress, PullOptions, Recipe, UnpackError, UnpackLimits,
};

use super::*;
use fake::tar;

impl World {
    pub(super) fn import(&self, name: &str, bytes: &[u8]) -> Result<Image, EngineError> {
        let from = Import::Archive { name: "archive", bytes: &mut &*bytes, length: None };
        self.engine.image_import(name, from, UnpackLimits::default(), &mut |_| {})
    }

    /// An archive of the tests' own file tree.
    pub(super) fn archive(&self) -> Vec<u8> {
        tar(&self.folder.path().join("cache/layers/base"))
    }

    /// Runs something in a sandbox of an image.
    pub(super) fn in_image(&self, image: &str, script: &str) -> String {
        let env = [("PATH".to_owned(), "/bin".to_owned())].into();
        let spec = Spec { from: Origin::Image(image.to_owned()), env, ..self.spec() };
        let running = self.engine.start(&spec).unwrap();
        let said = shell(&running, script);
        self.engine.remove(&running.id).unwrap();
        said.out
    }

    /// What builds left behind besides their locks.
    pub(super) fn half_made(&self) -> Vec<String> {
        let names = fs::read_dir(self.folder.path().join("cache/building")).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
        names.filter(|name| !name.ends_with(".lock")).collect()
    }

    pub(super) fn make(
        &self,
        text: &str,
        force: bool,
    ) -> (Result<Image, EngineError>, Vec<Progress>) {
        let recipe = Recipe::parse(text, self.folder.path()).unwrap();
        let mut seen = Vec::new();
        let made =
            self.engine.image_build(&recipe, BuildOptions { force }, &mut |step| seen.push(step));
        (made, seen)
    }
}

fn made(seen: &[Progress]) -> usize {
    seen.iter().filter(|step| matches!(step, Progress::StepDone { .. })).count()
}

#[test]
fn an_archive_becomes_an_image_whatever_it_is_compressed_with() {
    let world = World::new();
    let plain = world.archive();
    let first = world.import("plain", &plain).unwrap();
    let second = world.import("packed", &fake::gzip(&plain)).unwrap();
    assert_eq!(first.layers, second.layers, "one content is one layer");
    assert_eq!(world.in_image("packed", "echo it runs"), "it runs");
    assert_eq!(world.half_made(), [""; 0]);
}

#[test]
fn a_folder_becomes_an_image_without_its_devices() {
    let world = World::new();
    let root = world.folder.path().join("cache/layers/base");
    let node = |path: &str| {
        HostCommand::new("mknod").arg(root.join(path)).args(["c", "1", "3"]).status().unwrap()
    };
    assert!(node("dev/null").success());
    let import = || {
        world.engine.image_import(
            "folder",
            Import::Folder(&root),
            UnpackLimits::default(),
            &mut |_| {},
        )
    };
    let image = import().unwrap();
    let layer = world.folder.path().join("cache/layers").join(image.layers[0].as_str());
    assert!(layer.join("bin/busybox").exists() && !layer.join("dev/null").exists());
    assert!(node("etc/device").success());
    let refused = import();
    assert!(
        matches!(refused, Err(EngineError::Unpack { source: UnpackError::Device { .. }, .. })),
        "{refused:?}"
    );
    assert_eq!(world.engine.image("folder").unwrap(), Some(image));
}

#[test]
fn a_truncated_archive_leaves_the_old_image_and_nothing_else() {
    let world = World::new();
    let plain = world.archive();
    let image = world.import("kept", &plain).unwrap();
    let packed = fake::gzip(&plain);
    for cut in [&plain[..plain.len() / 2], &packed[..packed.len() - 5], b"", &plain[512..2048]] {
        let refused = world.import("kept", cut);
        assert!(
            matches!(refused, Err(EngineError::Unpack { source: UnpackError::Archive(_), .. })),
            "{refused:?}"
        );
    }
    assert_eq!(world.engine.image("kept").unwrap(), Some(image));
    assert_eq!(world.half_made(), [""; 0]);
}

#[test]
fn a_saved_image_is_told_from_a_root_file_system() {
    let world = World::new();
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("manifest.json"), "[]").unwrap();
    let refused = world.import("saved", &tar(folder.path())).unwrap_err().to_string();
    assert!(refused.contains("is a saved image"), "{refused}");
    assert_eq!(world.half_made(), [""; 0]);
}

#[test]
fn a_name_that_is_a_path_names_no_image() {
    let world = World::new();
    for name in ["../evil", "a/b", "", "UPPER"] {
        assert!(
            matches!(world.import(name, &world.archive()), Err(EngineError::Invalid { .. })),
            "{name}"
        );
    }
}

#[test]
fn an_unknown_image_is_named() {
    let world = World::new();
    let spec = Spec { from: Origin::Image("nothing".to_owned()), ..world.spec() };
    let error = world.engine.start(&spec).unwrap_err();
    assert_eq!(error.to_string(), "image `nothing` is not on this host");
    let (built, _) = world.make("name = \"x\"\nfrom = \"nothing\"", false);
    assert_eq!(built.unwrap_err().to_string(), "image `nothing` is not on this host");
}

#[test]
fn an_image_that_lost_a_layer_is_named_with_it_and_built_again() {
    let world = World::new();
    fs::write(world.folder.path().join("root.tar"), world.archive()).unwrap();
    let recipe = "name = \"x\"\nfrom = { tar = \"root.tar\" }";
    let image = world.make(recipe, false).0.unwrap();
    fs::remove_dir_all(world.folder.path().join("cache/layers").join(image.layers[0].as_str()))
        .unwrap();
    let spec = Spec { from: Origin::Image("x".to_owned()), ..world.spec() };
    let error = world.engine.start(&spec).unwrap_err();
    assert!(matches!(error, EngineError::LayerMissing { .. }), "{error:?}");
    let (again, seen) = world.make(recipe, false);
    assert_eq!((again.unwrap().layers, made(&seen)), (image.layers, 1));
}

#[test]
fn a_recipe_starts_from_an_archive_and_feels_its_change() {
    let world = World::new();
    let file = world.folder.path().join("root.tar.gz");
    fs::write(&file, fake::gzip(&world.archive())).unwrap();
    let recipe = "name = \"x\"\nfrom = { tar = \"root.tar.gz\" }\n[[step]]\nenv = { PATH = \"/bin\" }\n[[step]]\nrun = \"echo made > /made\"";
    let (image, seen) = world.make(recipe, false);
    let image = image.unwrap();
    assert_eq!((made(&seen), world.in_image("x", "cat /made")), (2, "made".to_owned()));
    let (again, seen) = world.make(recipe, false);
    assert_eq!((again.unwrap(), made(&seen)), (image.clone(), 0));
    fs::write(world.folder.path().join("cache/layers/base/etc/new"), "new").unwrap();
    fs::write(&file, fake::gzip(&world.archive())).unwrap();
    let (other, seen) = world.make(recipe, false);
    assert_ne!(other.unwrap().layers[0], image.layers[0]);
    assert_eq!((made(&seen), world.in_image("x", "cat /etc/new /made")), (2, "newmade".to_owned()));
}

#[test]
fn force_makes_every_step_again() {
    let world = World::new();
    fs::write(world.folder.path().join("root.tar"), world.archive()).unwrap();
    let recipe = "name = \"x\"\nfrom = { tar = \"root.tar\" }\n[[step]]\nenv = { PATH = \"/bin\" }\n[[step]]\nrun = \"echo made > /made\"";
    let first = world.make(recipe, false).0.unwrap();
    let (second, seen) = world.make(recipe, true);
    let second = second.unwrap();
    assert_eq!(made(&seen), 2);
    assert!(first.layers.iter().all(|layer| !second.layers.contains(layer)));
    // From now on the newer layers are the cache.
    assert_eq!(world.make(recipe, false).0.unwrap(), second);
}

#[test]
fn who_else_stands_on_an_image_is_known() {
    let world = World::new();
    let image = world.import("one", &world.archive()).unwrap();
    world.import("two", &world.archive()).unwrap();
    let running = world
        .engine
        .start(&Spec { from: Origin::Image("one".to_owned()), ..world.spec() })
        .unwrap();
    let users = world.engine.image_users(&image).unwrap();
    assert_eq!((users.images, users.sandboxes), (vec!["two".to_owned()], vec![running.id.clone()]));
    assert!(world.engine.image_layers(&image).unwrap()[0].1 > 1_000_000);
    // What runs goes on without its name, and collecting leaves it alone.
    world.engine.image_remove("one").unwrap();
    world.engine.image_remove("two").unwrap();
    world.engine.gc(false).unwrap();
    assert_eq!(shell(&running, "echo on").out, "on");
    world.engine.remove(&running.id).unwrap();
    // What is planned from when the world ends.
    fs::create_dir_all(world.folder.path().join("cache/layers/base")).unwrap();
}
