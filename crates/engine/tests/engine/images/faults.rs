//! What is left when a build is killed or the disk is full, and what of the host a build must not show.
//! Each runs the tests' own binary a second time, as a process that can be killed or has a disk of its own.

use super::*;

const ROOT: &str =
    "name = \"x\"\nfrom = { tar = \"root.tar\" }\n[[step]]\nenv = { PATH = \"/bin\" }\n";

/// This binary, told to run one ignored test.
fn again(test: &str) -> HostCommand {
    let mut command = HostCommand::new(std::env::current_exe().unwrap());
    command.args([
        "--ignored",
        "--exact",
        &format!("images::faults::{test}"),
        "--nocapture",
        "--test-threads=1",
    ]);
    command
}

fn place() -> PathBuf {
    PathBuf::from(std::env::var_os("HARVEST_TEST_PLACE").expect("run by another test"))
}

/// An engine in a folder that another process shares.
fn engine_at(folder: &Path) -> Engine {
    let zygote = vec![env!("CARGO_BIN_EXE_harvest-zygote").into()];
    Engine::open(config(&folder.join("home"), &folder.join("cache"), zygote)).unwrap()
}

#[test]
#[ignore = "run by another test, which kills it"]
fn builds_until_it_is_killed() {
    let folder = place();
    let recipe =
        Recipe::parse(&format!("{ROOT}[[step]]\nrun = \"echo begun; sleep 1000\""), &folder)
            .unwrap();
    let built = engine_at(&folder).image_build(&recipe, BuildOptions::default(), &mut |step| {
        if matches!(step, Progress::Output { .. }) {
            println!("begun");
        }
    });
    panic!("it ended: {built:?}");
}

#[test]
#[ignore = "run by another test, which kills it"]
fn imports_until_it_is_killed() {
    let folder = place();
    let mut pipe = fs::File::open(folder.join("pipe")).unwrap();
    let from = Import::Archive { name: "pipe", bytes: &mut pipe, length: None };
    let made = engine_at(&folder)
        .image_import("x", from, UnpackLimits::default(), &mut |_| println!("begun"));
    panic!("it ended: {made:?}");
}

/// Starts a child, waits until it has begun, and kills it.
fn killed(mut command: HostCommand, meanwhile: impl FnOnce()) {
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    meanwhile();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("begun")), "it never began");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_build_killed_in_a_step_leaves_nothing_the_next_one_trips_over() {
    let world = World::new();
    fs::write(world.folder.path().join("root.tar"), world.archive()).unwrap();
    let old = world.make(&format!("{ROOT}[[step]]\nrun = \"echo old > /made\""), false).0.unwrap();
    let mut child = again("builds_until_it_is_killed");
    child.env("HARVEST_TEST_PLACE", world.folder.path());
    killed(child, || {});
    // The sandbox of a dead owner ends by itself.
    eventually("the step's sandbox is gone", || {
        world.engine.list().unwrap().iter().all(|id| {
            matches!(world.engine.find(id), Ok(SandboxState::Gone | SandboxState::Dead { .. }))
        })
    });
    assert_eq!(world.engine.image("x").unwrap(), Some(old));
    let (built, seen) = world.make(&format!("{ROOT}[[step]]\nrun = \"echo new > /made\""), false);
    built.unwrap();
    assert_eq!((made(&seen), world.in_image("x", "cat /made")), (1, "new".to_owned()));
    world.engine.gc(false).unwrap();
    assert_eq!(world.half_made(), [""; 0]);
    assert!(world.engine.list().unwrap().is_empty());
    fs::create_dir_all(world.folder.path().join("cache/layers/base")).unwrap();
}

#[test]
fn an_import_killed_in_the_middle_leaves_no_half_layer() {
    let world = World::new();
    let archive = world.archive();
    let pipe = world.folder.path().join("pipe");
    assert!(HostCommand::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut child = again("imports_until_it_is_killed");
    child.env("HARVEST_TEST_PLACE", world.folder.path());
    let mut writer = None;
    killed(child, || {
        let mut open = fs::File::options().write(true).open(&pipe).unwrap();
        open.write_all(&archive[..archive.len() / 2]).unwrap();
        eventually("something is unpacked", || !world.half_made().is_empty());
        writer = Some(open);
    });
    assert_eq!(world.engine.image("x").unwrap(), None);
    assert_eq!(world.half_made().len(), 1);
    let image = world.import("x", &archive).unwrap();
    assert_eq!(world.in_image("x", "echo whole"), "whole");
    world.engine.gc(false).unwrap();
    assert_eq!(world.half_made(), [""; 0]);
    assert!(world.engine.image_layers(&image).is_ok());
    fs::create_dir_all(world.folder.path().join("cache/layers/base")).unwrap();
}

#[test]
#[ignore = "run by another test, which gives it a small disk"]
fn works_on_a_small_disk() {
    let world = World::new();
    fs::write(world.folder.path().join("root.tar"), world.archive()).unwrap();
    let kept =
        world.make(&format!("{ROOT}[[step]]\nrun = \"echo kept > /made\""), false).0.unwrap();
    let (full, _) = world.make(&format!("{ROOT}[[step]]\nrun = \"cat /dev/zero > /big\""), false);
    let Err(EngineError::Build { tail, .. }) = full else { panic!("{full:?}") };
    assert!(tail.iter().any(|line| line.contains("No space left on device")), "{tail:?}");
    let large = tempfile::tempdir_in("/var/tmp").unwrap();
    let noise: Vec<u8> =
        (0..40u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect();
    fs::write(large.path().join("large"), noise).unwrap();
    let refused = world.import("large", &tar(large.path()));
    let Err(EngineError::Unpack { source: UnpackError::File { source, .. }, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(source.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(world.engine.image("x").unwrap(), Some(kept));
    // What could not be finished is gone, and with it the space it took.
    assert_eq!(world.half_made(), [""; 0]);
    assert_eq!(fs::read_dir(world.folder.path().join("cache/trash")).unwrap().count(), 0);
    assert_eq!(world.in_image("x", "cat /made"), "kept");
    fs::create_dir_all(world.folder.path().join("cache/layers/base")).unwrap();
    println!("it held");
}

#[test]
fn a_full_disk_fails_the_build_and_the_import_and_leaves_the_old_image() {
    let folder = tempfile::tempdir().unwrap();
    let inner = again("works_on_a_small_disk");
    // In a mount namespace of its own: the small disk is gone with it.
    let said = HostCommand::new("unshare")
        .args(["--mount", "sh", "-ec", "mount -t tmpfs -o size=24m tmpfs \"$0\"; exec \"$@\""])
        .arg(folder.path())
        .arg(inner.get_program())
        .args(inner.get_args())
        .env("TMPDIR", folder.path())
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&said.stdout);
    assert!(out.contains("it held"), "{out}\n{}", String::from_utf8_lossy(&said.stderr));
}

const PASSWORD: &str = "hunter2-of-the-proxy";

#[test]
#[ignore = "run by another test, which sets its environment"]
fn builds_behind_a_proxy() {
    let world = World::new();
    let folder = world.folder.path();
    fs::write(folder.join("root.tar"), world.archive()).unwrap();
    let seen = "echo proxy $https_proxy; cat /run/harvest/npmrc; echo $SSL_CERT_FILE $npm_config_cafile $UV_DEFAULT_INDEX; cat $SSL_CERT_FILE";
    let (failed, progress) =
        world.make(&format!("{ROOT}[[step]]\nrun = \"{seen}; exit 1\""), false);
    let Err(EngineError::Build { tail, .. }) = failed else { panic!("{failed:?}") };
    let said = format!("{}\n{progress:?}", tail.join("\n"));
    // The step had them all, and nobody else reads the secrets.
    assert!(said.contains("proxy http://***@proxy.test:3128"), "{said}");
    assert!(
        said.contains("/run/harvest/ca.pem /run/harvest/ca.pem https://***@index.test/simple"),
        "{said}"
    );
    assert!(said.contains("authority of the company"), "{said}");
    assert!(!said.contains(PASSWORD) && !said.contains("npm-token"), "{said}");
    world.make(&format!("{ROOT}[[step]]\nrun = \"echo made > /made\""), false).0.unwrap();
    let found = HostCommand::new("grep")
        .args(["-rlE", &format!("{PASSWORD}|npm-token|authority of the company|index.test")])
        .arg(folder.join("cache"))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
    println!("it held");
}

#[test]
fn what_a_build_takes_over_from_the_host_is_neither_told_nor_kept() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("npmrc"), "//npm.test/:_authToken=npm-token-1\n").unwrap();
    fs::write(folder.path().join("ca.pem"), "authority of the company\n").unwrap();
    let said = again("builds_behind_a_proxy")
        .env("https_proxy", format!("http://user:{PASSWORD}@proxy.test:3128"))
        .env("PIP_INDEX_URL", format!("https://user:{PASSWORD}@index.test/simple"))
        .env("NPM_CONFIG_USERCONFIG", folder.path().join("npmrc"))
        .env("SSL_CERT_FILE", folder.path().join("ca.pem"))
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&said.stdout);
    assert!(out.contains("it held"), "{out}\n{}", String::from_utf8_lossy(&said.stderr));
}
