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

/// The recipes and the lock files beside them, as a table of paths below `images` and texts.
fn recipes() -> String {
    // Read at run time, not with `env!`: the clone may have moved since this script was compiled.
    let crate_folder = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let folder = Path::new(&crate_folder).join("../../images");
    // Relative to the crate, for the same reason.
    println!("cargo::rerun-if-changed=../../images");
    let (folders, mut files): (Vec<_>, Vec<_>) =
        entries(&folder).into_iter().partition(|path| path.is_dir());
    files.extend(folders.iter().flat_map(|folder| entries(folder)));
    files.sort();
    let rows = files.iter().map(|path| {
        let name = path.strip_prefix(&folder).unwrap_or(path).display().to_string();
        format!("({name:?}, include_str!({:?})), ", path.display().to_string())
    });
    format!("&[{}]", rows.collect::<String>())
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
