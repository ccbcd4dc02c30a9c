//! The image recipes embedded in this binary, and the files that they copy.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use harvest_proto::SandboxId;
use harvest_providers::local::Recipes;

/// Paths below the folder of the recipes, with their texts.
const ALL: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/recipes.rs"));

/// The built-in recipes; written to a folder below `home` on first use.
pub(crate) fn all(home: &Path) -> Recipes {
    let folder = home.join("recipes");
    Recipes {
        names: ALL
            .iter()
            .filter_map(|(path, _)| path.strip_suffix(".toml"))
            .map(str::to_owned)
            .collect(),
        write_all: Arc::new(move || write_all(&folder)),
    }
}

/// Writes all recipes into one folder, since they refer to each other.
fn write_all(folder: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    for (path, text) in ALL {
        let path = folder.join(path);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        // Another task of this process may write the same file at the same time. In the folder
        // above, where no recipe copies it.
        let temporary = folder.join(format!(".{}", SandboxId::random().part()));
        fs::write(&temporary, text)?;
        fs::rename(temporary, path)?;
    }
    Ok(folder.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_recipe_parses() {
        let home = tempfile::tempdir().unwrap();
        assert!(
            ALL.iter().any(|(path, _)| *path == "claude.toml"),
            "the default image has a recipe"
        );
        let recipes = all(home.path());
        let folder = (recipes.write_all)().unwrap();
        for name in recipes.names {
            let recipe =
                harvest_images::Recipe::read(&folder.join(format!("{name}.toml"))).unwrap();
            assert_eq!(recipe.name, name);
            for step in recipe.steps {
                let harvest_images::RecipeStep::Copy { from, .. } = step else { continue };
                assert!(folder.join(&from).exists(), "{name} copies {}", from.display());
            }
        }
    }
}
