//! The image recipes embedded in this binary.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use harvest_proto::SandboxId;
use harvest_providers::local::Recipes;

const ALL: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/recipes.rs"));

/// The built-in recipes; written to a folder below `home` on first use.
pub(crate) fn all(home: &Path) -> Recipes {
    let folder = home.join("recipes");
    Recipes {
        names: ALL.iter().map(|(name, _)| (*name).to_owned()).collect(),
        write_all: Arc::new(move || write_all(&folder)),
    }
}

/// Writes all recipes into one folder, since they refer to each other.
fn write_all(folder: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    for (name, text) in ALL {
        // Another task of this process may write the same file at the same time.
        let temporary = folder.join(format!(".{name}.{}", SandboxId::random().part()));
        fs::write(&temporary, text)?;
        fs::rename(temporary, folder.join(format!("{name}.toml")))?;
    }
    Ok(folder.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_recipe_parses() {
        let home = tempfile::tempdir().unwrap();
        assert!(ALL.iter().any(|(name, _)| *name == "claude"), "the default image has a recipe");
        let recipes = all(home.path());
        let folder = (recipes.write_all)().unwrap();
        for name in recipes.names {
            let recipe =
                harvest_images::Recipe::read(&folder.join(format!("{name}.toml"))).unwrap();
            assert_eq!(recipe.name, name);
        }
    }
}
