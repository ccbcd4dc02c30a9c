//! Brings along what the binary needs beside itself: the supervisor (the file `HARVEST_SUPERVISOR` names,
//! if it has been built) and the recipes of images.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

fn main() {
    let out =
        PathBuf::from(env::var("OUT_DIR").expect("cargo tells every build script where to write"));
    write(&out.join("supervisor.rs"), &supervisor());
    write(&out.join("recipes.rs"), &recipes());
}

fn write(path: &Path, source: &str) {
    fs::write(path, source).expect("cargo's own folder can be written");
}

fn supervisor() -> String {
    println!("cargo::rerun-if-env-changed=HARVEST_SUPERVISOR");
    let named = env::var("HARVEST_SUPERVISOR").unwrap_or_default();
    if !named.is_empty() {
        println!("cargo::rerun-if-changed={named}");
    }
    match Path::new(&named).is_file() {
        true => format!("Some(include_bytes!({named:?}))"),
        false => "None".to_owned(),
    }
}

/// `images/*.toml` as a table of names and texts.
fn recipes() -> String {
    // Asked when it runs, not when it was compiled: a clone may have moved since.
    let here =
        env::var("CARGO_MANIFEST_DIR").expect("cargo tells every build script where its crate is");
    let folder = Path::new(&here).join("../../images");
    // Relative to the crate, for the same reason.
    println!("cargo::rerun-if-changed=../../images");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|ext| ext == "toml")).collect();
    files.sort();
    let rows = files.iter().map(|path| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        format!("({name:?}, include_str!({:?})), ", path.display().to_string())
    });
    format!("&[{}]", rows.collect::<String>())
}
