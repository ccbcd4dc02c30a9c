//! The recipes of images that come with this binary.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use harvest_proto::SandboxId;
use harvest_providers::machines::Recipes;

/// Name and text of each.
const ALL: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/recipes.rs"));

/// Those that come along, to be written below `home` when they are needed.
pub(crate) fn all(home: &Path) -> Recipes {
    let folder = home.join("recipes");
    Recipes {
        names: ALL.iter().map(|(name, _)| (*name).to_owned()).collect(),
        place: Arc::new(move || place(&folder)),
    }
}

/// Writes them side by side, as they refer to each other.
fn place(folder: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    for (name, text) in ALL {
        // Somebody else of this process may be at it as well.
        let half = folder.join(format!(".{name}.{}", SandboxId::random().part()));
        fs::write(&half, text)?;
        fs::rename(half, folder.join(format!("{name}.toml")))?;
    }
    Ok(folder.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recipe_that_comes_along_can_be_read() {
        let home = tempfile::tempdir().unwrap();
        assert!(ALL.iter().any(|(name, _)| *name == "claude"), "the default image has a recipe");
        let recipes = all(home.path());
        let folder = (recipes.place)().unwrap();
        for name in recipes.names {
            let recipe =
                harvest_engine::Recipe::read(&folder.join(format!("{name}.toml"))).unwrap();
            assert_eq!(recipe.name, name);
        }
    }
}
