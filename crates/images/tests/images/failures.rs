//! Killed builds, full disks, and secrets of the host. Each test runs this binary a second time, as
//! a process that can be killed or that has its own disk or environment.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command as HostCommand, Stdio},
};

use harvest_engine::SandboxState;
use harvest_images::{BuildOptions, ImageError, Import, Recipe, UnpackError, UnpackLimits};
use harvest_proto::api::ImageLine;

use crate::world::{World, engine_in, eventually, steps_run, tar};

const RECIPE: &str =
    "name = \"x\"\nfrom = { tar = \"root.tar\" }\n[[step]]\nenv = { PATH = \"/bin\" }\n";

/// The variable with the folder that both processes share.
const SHARED_FOLDER: &str = "HARVEST_TEST_FOLDER";

/// This binary with the arguments to run one ignored test.
fn rerun(test: &str) -> HostCommand {
    let mut command = HostCommand::new(std::env::current_exe().unwrap());
    let test = format!("failures::{test}");
    command.args(["--ignored", "--exact", &test, "--nocapture", "--test-threads=1"]);
    command
}

fn shared_folder() -> PathBuf {
    PathBuf::from(std::env::var_os(SHARED_FOLDER).expect("run by another test"))
}

#[test]
#[ignore = "run by another test, which kills it"]
fn builds_until_it_is_killed() {
    let folder = shared_folder();
    let text = format!("{RECIPE}[[step]]\nrun = \"echo begun; sleep 1000\"");
    let recipe = Recipe::parse(&text, &folder).unwrap();
    let (engine, options) = (engine_in(&folder), BuildOptions::default());
    let built = harvest_images::build(&engine, &recipe, options, &mut |report| {
        if matches!(report, ImageLine::Output { .. }) {
            println!("begun");
        }
    });
    panic!("the build ended: {built:?}");
}

#[test]
#[ignore = "run by another test, which kills it"]
fn imports_until_it_is_killed() {
    let folder = shared_folder();
    let mut pipe = fs::File::open(folder.join("pipe")).unwrap();
    let from = Import::Archive { name: "pipe", bytes: &mut pipe, length: None };
    let (engine, limits) = (engine_in(&folder), UnpackLimits::default());
    let imported = harvest_images::import(&engine, "x", from, limits, &mut |_| println!("begun"));
    panic!("the import ended: {imported:?}");
}

/// Starts a command, calls `meanwhile`, waits until the command has begun, and kills it.
fn kill_after_begin(mut command: HostCommand, meanwhile: impl FnOnce()) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    meanwhile();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("begun")), "it never began");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn killed_build_does_not_disturb_the_next() {
    let world = World::new();
    fs::write(world.folder.path().join("root.tar"), world.archive()).unwrap();
    let recipe = |text: &str| format!("{RECIPE}[[step]]\nrun = \"echo {text} > /made\"");
    let old = world.build(&recipe("old"), false).0.unwrap();
    let mut child = rerun("builds_until_it_is_killed");
    child.env(SHARED_FOLDER, world.folder.path());
    kill_after_begin(child, || {});
    // The zygote kills the sandbox of a dead owner.
    eventually("the step's sandbox is gone", || {
        world.engine.list().unwrap().iter().all(|id| {
            matches!(world.engine.find(id), Ok(SandboxState::Gone | SandboxState::Dead { .. }))
        })
    });
    assert_eq!(world.engine.image("x").unwrap(), Some(old));
    let (built, reports) = world.build(&recipe("new"), false);
    built.unwrap();
    assert_eq!((steps_run(&reports), world.run_in("x", "cat /made")), (1, "new".to_owned()));
    world.engine.gc(false).unwrap();
    assert_eq!(world.unfinished(), [""; 0]);
    assert!(world.engine.list().unwrap().is_empty());
}

#[test]
fn killed_import_leaves_no_partial_layer() {
    let world = World::new();
    let archive = world.archive();
    let pipe = world.folder.path().join("pipe");
    assert!(HostCommand::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut child = rerun("imports_until_it_is_killed");
    child.env(SHARED_FOLDER, world.folder.path());
    let mut writer = None;
    kill_after_begin(child, || {
        let mut open = fs::File::options().write(true).open(&pipe).unwrap();
        open.write_all(&archive[..archive.len() / 2]).unwrap();
        eventually("something is unpacked", || !world.unfinished().is_empty());
        writer = Some(open);
    });
    assert_eq!(world.engine.image("x").unwrap(), None);
    assert_eq!(world.unfinished().len(), 1);
    let image = world.import("x", &archive).unwrap();
    assert_eq!(world.run_in("x", "echo whole"), "whole");
    world.engine.gc(false).unwrap();
    assert_eq!(world.unfinished(), [""; 0]);
    assert!(world.engine.image_layers(&image).is_ok());
}

#[test]
#[ignore = "run by another test, which gives it a small disk"]
fn works_on_a_small_disk() {
    let world = World::new();
    fs::write(world.folder.path().join("root.tar"), world.archive()).unwrap();
    let recipe = |script: &str| format!("{RECIPE}[[step]]\nrun = \"{script}\"");
    let image = world.build(&recipe("echo kept > /made"), false).0.unwrap();
    let (full, _) = world.build(&recipe("cat /dev/zero > /big"), false);
    let Err(ImageError::Step { tail, .. }) = full else { panic!("{full:?}") };
    assert!(tail.iter().any(|line| line.contains("No space left on device")), "{tail:?}");
    let large = tempfile::tempdir_in("/var/tmp").unwrap();
    let noise: Vec<u8> =
        (0..40u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect();
    fs::write(large.path().join("large"), noise).unwrap();
    let refused = world.import("large", &tar(large.path()));
    let Err(ImageError::Unpack { source: UnpackError::File { source, .. }, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(source.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(world.engine.image("x").unwrap(), Some(image));
    // Unfinished layers are deleted at once, which frees their space.
    assert_eq!(world.unfinished(), [""; 0]);
    assert_eq!(fs::read_dir(world.folder.path().join("cache/trash")).unwrap().count(), 0);
    assert_eq!(world.run_in("x", "cat /made"), "kept");
    println!("all passed");
}

#[test]
fn full_disk_keeps_the_old_image() {
    let folder = tempfile::tempdir().unwrap();
    let inner = rerun("works_on_a_small_disk");
    // The small disk is mounted in a mount namespace and goes away with it.
    let output = HostCommand::new("unshare")
        .args(["--mount", "sh", "-ec", "mount -t tmpfs -o size=24m tmpfs \"$0\"; exec \"$@\""])
        .arg(folder.path())
        .arg(inner.get_program())
        .args(inner.get_args())
        .env("TMPDIR", folder.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("all passed"), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
}

const PASSWORD: &str = "hunter2-of-the-proxy";

#[test]
#[ignore = "run by another test, which sets its environment"]
fn builds_behind_a_proxy() {
    let world = World::new();
    let folder = world.folder.path();
    fs::write(folder.join("root.tar"), world.archive()).unwrap();
    let show = "echo proxy $https_proxy; cat /run/harvest/npmrc; \
                echo $SSL_CERT_FILE $npm_config_cafile $UV_DEFAULT_INDEX; cat $SSL_CERT_FILE";
    let (failed, reports) = world
        .build(&format!("network = \"host\"\n{RECIPE}[[step]]\nrun = \"{show}; exit 1\""), false);
    let Err(ImageError::Step { tail, .. }) = failed else { panic!("{failed:?}") };
    let output = format!("{}\n{reports:?}", tail.join("\n"));
    // The step got all settings, and its output shows none of the secrets.
    assert!(output.contains("proxy http://***@proxy.test:3128"), "{output}");
    let paths = "/run/harvest/ca.pem /run/harvest/ca.pem https://***@index.test/simple";
    assert!(output.contains(paths), "{output}");
    assert!(output.contains("authority of the company"), "{output}");
    assert!(!output.contains(PASSWORD) && !output.contains("npm-token"), "{output}");
    world.build(&format!("{RECIPE}[[step]]\nrun = \"echo made > /made\""), false).0.unwrap();
    let found = HostCommand::new("grep")
        .args(["-rlE", &format!("{PASSWORD}|npm-token|authority of the company|index.test")])
        .arg(folder.join("cache"))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
    println!("all passed");
}

#[test]
fn host_secrets_reach_neither_output_nor_image() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("npmrc"), "//npm.test/:_authToken=npm-token-1\n").unwrap();
    fs::write(folder.path().join("ca.pem"), "authority of the company\n").unwrap();
    let output = rerun("builds_behind_a_proxy")
        .env("https_proxy", format!("http://user:{PASSWORD}@proxy.test:3128"))
        .env("PIP_INDEX_URL", format!("https://user:{PASSWORD}@index.test/simple"))
        .env("NPM_CONFIG_USERCONFIG", folder.path().join("npmrc"))
        .env("SSL_CERT_FILE", folder.path().join("ca.pem"))
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("all passed"), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
}
