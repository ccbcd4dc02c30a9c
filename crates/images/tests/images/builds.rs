//! Builds of recipes: the cache, failing steps, concurrent builds.

use std::{fs, thread};

use harvest_engine::{EngineError, Image};
use harvest_images::{BuildOptions, ImageError, Recipe};
use harvest_proto::api::ImageLine;

use crate::world::{World, gzip, spec, steps_run};

const RECIPE: &str = r#"
    name = "small"
    from = { folder = "root" }
    [[step]]
    env = { PATH = "/bin", GREETING = "/greetings/greeting" }
    [[step]]
    copy = { from = "files", to = "/greetings" }
    [[step]]
    run = "cat $GREETING > /made; ls /run/harvest >> /seen; touch /tmp/left"
    [[step]]
    workdir = "/greetings"
"#;

/// A world with the files that [`RECIPE`] copies.
fn world_with_files() -> World {
    let world = World::new();
    fs::create_dir(world.folder.path().join("files")).unwrap();
    fs::write(world.folder.path().join("files/greeting"), "hello").unwrap();
    world
}

#[test]
fn unchanged_steps_come_from_the_cache() {
    let world = world_with_files();
    let (image, reports) = world.build(RECIPE, false);
    let image = image.unwrap();
    assert_eq!(steps_run(&reports), 3);
    assert_eq!((image.layers.len(), image.config.workdir.as_str()), (3, "/greetings"));
    let script = "pwd; cat /made; ls /run 2>/dev/null; ls /seen";
    assert_eq!(world.run_in("small", script), "/greetings\nhello/seen");
    let (again, reports) = world.build(RECIPE, false);
    assert_eq!(again.unwrap(), image);
    let cached = |report: &ImageLine| matches!(report, ImageLine::StepCached { .. });
    assert!(reports.iter().all(cached), "{reports:?}");
    // A change in the last step keeps the layers before it.
    let (other, reports) = world.build(&RECIPE.replace("/made;", "/made; true;"), false);
    assert_eq!(other.unwrap().layers[..2], image.layers[..2]);
    assert_eq!(steps_run(&reports), 1);
    assert!(world.engine.list().unwrap().is_empty());
}

#[test]
fn built_in_recipe_takes_over_image_of_copy() {
    let world = world_with_files();
    let of_copy = world.build(RECIPE, false).0.unwrap();
    assert_eq!(of_copy.source, "recipe, from folder root");
    let recipe = Recipe::parse(RECIPE, world.folder.path()).unwrap();
    let options = BuildOptions { built_in: true, ..BuildOptions::default() };
    let image = harvest_images::build(&world.engine, &recipe, options, &mut |_| {}).unwrap();
    assert_eq!(image, Image { source: "built-in recipe, from folder root".to_owned(), ..of_copy });
    assert_eq!(world.engine.image("small").unwrap().unwrap(), image);
    assert_eq!(world.build(RECIPE, false).0.unwrap(), image, "a copy does not take it back");
}

#[test]
fn record_of_image_carries_stated_agents() {
    let world = world_with_files();
    assert!(world.build(RECIPE, false).0.unwrap().config.agents.is_empty());
    let agents = world.folder.path().join("files/agents.json");
    fs::write(&agents, r#"{"claude": "2.1"}"#).unwrap();
    let stated = "copy = { from = \"files\", to = \"/etc/harvest\" }";
    let recipe = RECIPE.replace("workdir = \"/greetings\"", stated);
    let image = world.build(&recipe, false).0.unwrap();
    assert_eq!(image.config.agents, [("claude".to_owned(), "2.1".to_owned())].into());
    assert_eq!(world.engine.image("small").unwrap().unwrap(), image);
    fs::write(agents, "[]").unwrap();
    let refused = world.build(&recipe, false).0.unwrap_err().to_string();
    assert!(refused.contains("/etc/harvest/agents.json"), "{refused}");
}

#[test]
fn failed_step_reports_output_and_keeps_old_image() {
    let world = world_with_files();
    let image = world.build(RECIPE, false).0.unwrap();
    let failing = RECIPE.replace(
        "touch /tmp/left",
        "i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo line $i; done; exit 3",
    );
    let Err(ImageError::Step { what, tail, .. }) = world.build(&failing, false).0 else {
        panic!("the build succeeded")
    };
    assert!(what.starts_with("run cat"), "{what}");
    assert_eq!(
        (tail.len(), tail[38].as_str(), tail[39].as_str()),
        (40, "line 60", "it exited with code 3")
    );
    assert_eq!(world.engine.image("small").unwrap(), Some(image));
    assert!(world.engine.list().unwrap().is_empty());
}

#[test]
fn image_is_published_only_if_a_sandbox_starts() {
    let world = world_with_files();
    let image = world.build(RECIPE, false).0.unwrap();
    // A file in the place of a folder on which every sandbox mounts something.
    let step = "[[step]]\ncopy = { from = \"files/greeting\", to = \"/proc\" }\n";
    assert!(world.build(&format!("{RECIPE}\n{step}"), false).0.is_err());
    assert_eq!(world.engine.image("small").unwrap(), Some(image));
    assert!(world.engine.list().unwrap().is_empty());
}

#[test]
fn concurrent_builds_make_one_image() {
    let world = world_with_files();
    let images: Vec<Image> = thread::scope(|scope| {
        let builds = [0, 1].map(|_| scope.spawn(|| world.build(RECIPE, false).0.unwrap()));
        builds.map(|build| build.join().unwrap()).into()
    });
    assert_eq!(images[0], images[1]);
}

#[test]
fn missing_image_is_named_in_the_error() {
    let world = World::new();
    let error = world.engine.start(&spec("nothing")).unwrap_err();
    assert_eq!(error.to_string(), "image `nothing` is not on this host");
    let (built, _) = world.build("name = \"x\"\nfrom = \"nothing\"", false);
    assert_eq!(built.unwrap_err().to_string(), "image `nothing` is not on this host");
}

#[test]
fn image_with_missing_layer_is_rebuilt() {
    let world = World::new();
    fs::write(world.folder.path().join("root.tar"), world.archive()).unwrap();
    let recipe = "name = \"x\"\nfrom = { tar = \"root.tar\" }";
    let image = world.build(recipe, false).0.unwrap();
    fs::remove_dir_all(world.layer_path(&image, 0)).unwrap();
    let error = world.engine.start(&spec("x")).unwrap_err();
    assert!(matches!(error, EngineError::LayerMissing { .. }), "{error:?}");
    let (again, reports) = world.build(recipe, false);
    assert_eq!((again.unwrap().layers, steps_run(&reports)), (image.layers, 1));
}

#[test]
fn changed_archive_rebuilds_the_image() {
    let world = World::new();
    let file = world.folder.path().join("root.tar.gz");
    fs::write(&file, gzip(&world.archive())).unwrap();
    let recipe = "name = \"x\"\nfrom = { tar = \"root.tar.gz\" }\n\
                  [[step]]\nenv = { PATH = \"/bin\" }\n[[step]]\nrun = \"echo made > /made\"";
    let (image, reports) = world.build(recipe, false);
    let image = image.unwrap();
    assert_eq!((steps_run(&reports), world.run_in("x", "cat /made")), (2, "made".to_owned()));
    let (again, reports) = world.build(recipe, false);
    assert_eq!((again.unwrap(), steps_run(&reports)), (image.clone(), 0));
    fs::write(world.root().join("etc/new"), "new").unwrap();
    fs::write(&file, gzip(&world.archive())).unwrap();
    let (other, reports) = world.build(recipe, false);
    assert_ne!(other.unwrap().layers[0], image.layers[0]);
    let output = world.run_in("x", "cat /etc/new /made");
    assert_eq!((steps_run(&reports), output), (2, "newmade".to_owned()));
}

#[test]
fn force_runs_every_step_again() {
    let world = World::new();
    fs::write(world.folder.path().join("root.tar"), world.archive()).unwrap();
    let recipe = "name = \"x\"\nfrom = { tar = \"root.tar\" }\n\
                  [[step]]\nenv = { PATH = \"/bin\" }\n[[step]]\nrun = \"echo made > /made\"";
    let first = world.build(recipe, false).0.unwrap();
    let (second, reports) = world.build(recipe, true);
    let second = second.unwrap();
    assert_eq!(steps_run(&reports), 2);
    assert!(first.layers.iter().all(|layer| !second.layers.contains(layer)));
    // From now on the new layers are the cached ones.
    assert_eq!(world.build(recipe, false).0.unwrap(), second);
}
