//! Embeds the supervisor (the file named by `HARVEST_SUPERVISOR`, if it has been built) and the
//! image recipes into the binary.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

fn main() {
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    write(&out.join("supervisor.rs"), &supervisor());
    write(&out.join("recipes.rs"), &recipes());
}

fn write(path: &Path, source: &str) {
    fs::write(path, source).expect("OUT_DIR is writable");
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
    // Read at run time, not with `env!`: the clone may have moved since this script was compiled.
    let crate_folder = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let folder = Path::new(&crate_folder).join("../../images");
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
