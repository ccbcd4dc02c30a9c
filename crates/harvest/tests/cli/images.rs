//! `harvest image` without a server: import, list, inspect and remove.

use std::{fs, io::Write, process::Stdio};

use super::*;

impl Host {
    fn json(&self, args: &[&str]) -> serde_json::Value {
        let output = self.harvest(&[args, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// A folder with a root file system, and a tar of it.
    fn root(&self) -> (String, Vec<u8>) {
        let folder = self.home.path().join("rootfs");
        fs::create_dir_all(folder.join("etc")).unwrap();
        fs::write(folder.join("etc/name"), "text").unwrap();
        let tar = Command::new("tar")
            .args(["--owner=0", "--group=0", "-C"])
            .arg(&folder)
            .args(["-c", "."])
            .output()
            .unwrap();
        (folder.to_str().unwrap().to_owned(), tar.stdout)
    }
}

#[test]
fn image_is_imported_listed_inspected_and_removed() {
    let host = Host::new();
    let (folder, tar) = host.root();
    let file = host.home.path().join("root.tar");
    fs::write(&file, tar).unwrap();
    let output = host.harvest(&["image", "import", "one", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("img_"));
    assert!(text(&output.stderr).contains("Imported one (0 MB) in "), "{}", text(&output.stderr));
    host.harvest(&["image", "import", "two", &folder]);
    let listed = host.json(&["image", "ls"]);
    let names: Vec<_> =
        listed.as_array().unwrap().iter().map(|image| image["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["one", "two"]);
    let one = host.json(&["image", "inspect", "one"]);
    assert!(one["layers"][0]["bytes"].as_u64().unwrap() > 0, "{one}");
    assert_eq!(one["source"], format!("archive {}", file.display()));
    let removed = host.json(&["image", "rm", "one"]);
    assert_eq!(removed["removed"], "one");
    let output = host.harvest(&["image", "inspect", "one"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), "error: image `one` is not on this host\nhint: images: two\n");
}

#[test]
fn archive_is_read_from_standard_input() {
    let host = Host::new();
    let (_, tar) = host.root();
    let mut child = Command::new(env!("CARGO_BIN_EXE_harvest"))
        .args(["image", "import", "piped", "-"])
        .env_clear()
        .env("PATH", std::env::var("PATH").unwrap())
        .env("HOME", host.home.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&tar).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(host.json(&["image", "inspect", "piped"])["source"], "archive standard input");
}

#[test]
fn invalid_or_large_archive_is_refused_with_hint() {
    let host = Host::new();
    let (_, tar) = host.root();
    let file = host.home.path().join("root.tar");
    fs::write(&file, &tar[..700]).unwrap();
    let import = |options: &[&str]| {
        let output =
            host.harvest(&[&["image", "import", "x", file.to_str().unwrap()], options].concat());
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    assert!(import(&[]).contains("the archive is truncated"), "{}", import(&[]));
    fs::write(&file, &tar).unwrap();
    let error = import(&["--max-size", "1"]);
    assert!(error.contains("more than 1 bytes") && error.contains("--max-size"), "{error}");
    assert_eq!(host.json(&["image", "ls"]).as_array().unwrap().len(), 0);
}

#[test]
fn reference_without_registry_is_refused_with_example() {
    let output = Host::new().harvest(&["image", "pull", "debian:12"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("docker.io/library/debian:12"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn credentials_in_reference_are_not_printed() {
    let output = Host::new().harvest(&["image", "pull", "https://user:hidden@r.test/a"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(!error.contains("hidden") && error.contains("~/.docker/config.json"), "{error}");
}

#[test]
fn saved_image_folder_is_not_a_root() {
    let host = Host::new();
    let folder = host.home.path().join("saved");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("oci-layout"), "{}").unwrap();
    let output = host.harvest(&["image", "import", "x", folder.to_str().unwrap()]);
    let error = text(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("is a saved image"), "{error}");
    assert_eq!(host.json(&["image", "ls"]).as_array().unwrap().len(), 0);
}

#[test]
fn unknown_recipe_key_suggests_nearest() {
    let host = Host::new();
    let file = host.home.path().join("wrong.toml");
    fs::write(&file, "name = \"x\"\nform = \"base\"").unwrap();
    let output = host.harvest(&["image", "build", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.contains("unknown key `form` in the recipe; did you mean `from`?"), "{error}");
}
