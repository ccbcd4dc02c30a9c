//! Snapshots and builds with real sandboxes.

use harvest_engine::{Before, BuildOptions, Change, Image, Progress, Recipe};
use harvest_proto::SnapshotId;

use super::*;

impl World {
    pub(crate) fn start_from(&self, from: Origin) -> Running {
        self.engine.start(&Spec { id: SandboxId::random(), from, ..self.spec() }).unwrap()
    }

    pub(crate) fn says(&self, from: Origin, script: &str) -> String {
        let running = self.start_from(from);
        let said = shell(&running, script);
        self.engine.remove(&running.id).unwrap();
        said.out
    }

    fn build(&self, text: &str) -> (Result<Image, EngineError>, Vec<Progress>) {
        let recipe = Recipe::parse(text, &self.folder.path().join("recipe")).unwrap();
        let mut seen = Vec::new();
        let built =
            self.engine.image_build(&recipe, BuildOptions::default(), &mut |step| seen.push(step));
        (built, seen)
    }

    /// A recipe's folder with the file tree of the tests' own layer and something to copy.
    pub(crate) fn recipe_folder(&self) {
        let folder = self.folder.path().join("recipe");
        fs::create_dir_all(folder.join("files")).unwrap();
        fs::write(folder.join("files/greeting"), "hello").unwrap();
        symlink(self.folder.path().join("cache/layers/base"), folder.join("tree")).unwrap();
    }
}

const RECIPE: &str = r#"
    name = "small"
    from = { folder = "tree" }
    [[step]]
    env = { PATH = "/bin", GREETING = "/greetings/greeting" }
    [[step]]
    copy = { from = "files", to = "/greetings" }
    [[step]]
    run = "cat $GREETING > /made; ls /run/harvest >> /seen; touch /tmp/left"
    [[step]]
    workdir = "/greetings"
"#;

#[test]
fn two_snapshots_differ_in_what_was_done_between_them() {
    for world in World::each() {
        let kept = |running: &Running| {
            let snapshot = SnapshotId::random();
            world.engine.capture(&running.id, &snapshot).unwrap();
            snapshot
        };
        let running = world.start();
        shell(
            &running,
            "echo 1 > /file; mkdir /folder; echo kept > /folder/kept; echo same > /same",
        );
        let first = kept(&running);
        shell(
            &running,
            "echo 22 > /file; rm /folder/kept; rm /bin/wc; touch /same; echo same > /same",
        );
        let second = kept(&running);
        let again = world.start_from(Origin::Snapshot(second.clone()));
        shell(&again, "rm -r /folder; mkdir /folder; echo 1 > /folder/new");
        let third = kept(&again);
        let told = |before: &Before, after: &SnapshotId| {
            let changes = world.engine.changes(before, after, 100).unwrap();
            let line = |change: &Change| format!("{:?} {}", change.how, change.path.display());
            changes.entries.iter().map(line).collect::<Vec<_>>()
        };
        let of = |snapshot: &SnapshotId| Before::Snapshot(snapshot.clone());
        assert_eq!(
            told(&of(&first), &second),
            ["Changed file", "Removed bin/wc", "Removed folder/kept"]
        );
        assert_eq!(told(&of(&second), &third), ["Added folder/new"]);
        assert_eq!(told(&Before::BeginningOf(third.clone()), &third), ["Added folder/new"]);
        let all = told(&Before::BeginningOf(first.clone()), &third);
        for line in
            ["Added file", "Added same", "Removed bin/wc", "Added folder", "Added folder/new"]
        {
            assert!(all.contains(&line.to_owned()), "{line}: {all:?}");
        }
        assert_eq!(told(&of(&third), &third), Vec::<String>::new());
        for running in [running, again] {
            world.engine.remove(&running.id).unwrap();
        }
    }
}

#[test]
fn a_snapshot_holds_the_disk_of_its_moment() {
    for world in World::each() {
        hold_their_moments(&world);
    }
}

fn hold_their_moments(world: &World) {
    let running = world.start();
    shell(&running, "echo 1 > /file; mkdir /folder; echo kept > /folder/kept; rm /bin/wc");
    let first = SnapshotId::random();
    let captured = world.engine.capture(&running.id, &first).unwrap();
    assert_eq!(captured.snapshot.layers.len(), 2);
    let said = shell(&running, "echo 2 > /file; rm -r /folder; mkdir /folder; echo on");
    assert_eq!(said.out, "on", "it goes on after a capture");
    let second = SnapshotId::random();
    world.engine.capture(&running.id, &second).unwrap();
    shell(&running, "echo 3 > /file");
    let last = SnapshotId::random();
    world.engine.end_kept(&running.id, &last).unwrap();
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
    let look = "cat /file; ls /folder; ls /bin/wc 2>/dev/null";
    assert_eq!(world.says(Origin::Snapshot(first), look), "1\nkept");
    assert_eq!(world.says(Origin::Snapshot(second), look), "2");
    assert_eq!(world.says(Origin::Snapshot(last.clone()), look), "3");
    assert_eq!(world.engine.end_kept(&running.id, &last).unwrap().id, last);
}

#[test]
fn a_sandbox_that_died_by_itself_leaves_its_disk() {
    for world in World::each() {
        leaves_its_disk(&world);
    }
}

fn leaves_its_disk(world: &World) {
    let running = world.start();
    shell(&running, "echo work > /file");
    assert!(
        HostCommand::new("kill").args(["-9", &running.pid.to_string()]).status().unwrap().success()
    );
    world.engine.wait(&running.id).unwrap();
    let snapshot = SnapshotId::random();
    world.engine.end_kept(&running.id, &snapshot).unwrap();
    assert_eq!(world.says(Origin::Snapshot(snapshot), "cat /file"), "work");
}

#[test]
fn a_writer_stands_still_while_it_is_captured() {
    for world in World::each() {
        stands_still(&world);
    }
}

fn stands_still(world: &World) {
    let running = world.start();
    // Two files that are always written one after the other: a torn capture has them far apart.
    let script = "i=0; while :; do i=$((i+1)); echo $i > /tmp/a; echo $i > /tmp/b; done";
    let writer = thread::spawn({
        let running = running.clone();
        move || {
            let endless =
                Command { timeout_millis: Some(60_000), ..command(&["sh", "-c", script]) };
            exec(&running, endless)
        }
    });
    eventually("the writer writes", || !shell(&running, "cat /tmp/b 2>/dev/null").out.is_empty());
    for _ in 0..5 {
        let id = SnapshotId::random();
        world.engine.capture(&running.id, &id).unwrap();
        let seen = world.says(Origin::Snapshot(id), "cat /tmp/a; echo; cat /tmp/b");
        let numbers: Vec<i64> =
            seen.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        // Between truncating and writing a file is empty; then there is nothing to compare.
        if let [first, second] = numbers[..] {
            assert!((0..=1).contains(&(first - second)), "{seen}");
        }
    }
    world.engine.kill(&running.id).unwrap();
    // Its connection broke under it; that is how it learns of the end.
    let _ = writer.join();
}

#[test]
fn an_image_is_built_once_and_then_taken_from_the_cache() {
    for world in World::each() {
        builds_once(&world);
    }
}

fn builds_once(world: &World) {
    world.recipe_folder();
    let (image, seen) = world.build(RECIPE);
    let image = image.unwrap();
    let made = seen.iter().filter(|step| matches!(step, Progress::StepDone { .. })).count();
    assert_eq!((made, image.layers.len(), image.config.workdir.as_str()), (3, 3, "/greetings"));
    let look = "pwd; cat /made; ls /run 2>/dev/null; ls /seen";
    assert_eq!(world.says(Origin::Image("small".to_owned()), look), "/greetings\nhello/seen");
    let (again, seen) = world.build(RECIPE);
    assert_eq!(again.unwrap(), image);
    assert!(seen.iter().all(|step| matches!(step, Progress::StepCached { .. })), "{seen:?}");
    // Another word in the last step: what lies before it stays.
    let (other, seen) = world.build(&RECIPE.replace("/made;", "/made; true;"));
    assert_eq!(other.unwrap().layers[..2], image.layers[..2]);
    assert_eq!(seen.iter().filter(|step| matches!(step, Progress::StepDone { .. })).count(), 1);
    assert!(world.engine.list().unwrap().is_empty());
}

#[test]
fn a_step_that_fails_says_why_and_keeps_the_old_image() {
    let world = World::new();
    world.recipe_folder();
    let image = world.build(RECIPE).0.unwrap();
    let failing = RECIPE.replace(
        "touch /tmp/left",
        "i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo line $i; done; exit 3",
    );
    let Err(EngineError::Build { what, tail, .. }) = world.build(&failing).0 else {
        panic!("it was built")
    };
    assert!(what.starts_with("run cat"), "{what}");
    assert_eq!(
        (tail.len(), tail[38].as_str(), tail[39].as_str()),
        (40, "line 60", "it exited with 3")
    );
    assert_eq!(world.engine.image("small").unwrap(), Some(image));
    assert!(world.engine.list().unwrap().is_empty());
}

#[test]
fn two_builds_of_one_image_at_once_make_one_image() {
    let world = World::new();
    world.recipe_folder();
    let images: Vec<Image> = thread::scope(|scope| {
        let builds = [0, 1].map(|_| scope.spawn(|| world.build(RECIPE).0.unwrap()));
        builds.map(|build| build.join().unwrap()).into()
    });
    assert_eq!(images[0], images[1]);
}

#[test]
fn collecting_takes_what_nothing_uses_and_leaves_what_runs() {
    let world = World::new();
    world.recipe_folder();
    let image = world.build(RECIPE).0.unwrap();
    let running = world.start_from(Origin::Image("small".to_owned()));
    world.engine.image_remove("small").unwrap();
    world.engine.capture(&running.id, &SnapshotId::random()).unwrap();
    let collected = world.engine.gc(false).unwrap();
    // The tests' own layer is nobody's here: its copy is what the image stands on.
    let names: Vec<_> = collected.layers.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["base"]);
    assert_eq!(shell(&running, "cat /made").out, "hello");
    world.engine.remove(&running.id).unwrap();
    for snapshot in world.engine.snapshots().unwrap() {
        world.engine.snapshot_remove(&snapshot.id).unwrap();
    }
    let collected = world.engine.gc(false).unwrap();
    assert!(image.layers.iter().all(|layer| collected.layers.contains(layer)), "{collected:?}");
    // What is planned from when the world ends.
    fs::create_dir(world.folder.path().join("cache/layers/base")).unwrap();
}
