//! The recipes of images that come with this binary, and those in files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::printer::Advice;

/// Name and text of each.
const ALL: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/recipes.rs"));

/// The file of a recipe: one that comes along, or one that somebody wrote.
pub(crate) fn find(home: &Path, named: &str) -> Result<PathBuf> {
    if named.ends_with(".toml") {
        return Ok(PathBuf::from(named));
    }
    if ALL.iter().any(|(name, _)| *name == named) {
        return Ok(place(home)?.join(format!("{named}.toml")));
    }
    let names: Vec<&str> = ALL.iter().map(|(name, _)| *name).collect();
    let hint = format!("there are {}; or name a file that ends in .toml", names.join(", "));
    Err(Advice::new(format!("there is no recipe `{named}`"), hint).into())
}

/// Writes them side by side, as they refer to each other.
fn place(home: &Path) -> Result<PathBuf> {
    let folder = home.join("recipes");
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(&folder)?;
        for (name, text) in ALL {
            let half = folder.join(format!(".{name}.{}", std::process::id()));
            fs::write(&half, text)?;
            fs::rename(half, folder.join(format!("{name}.toml")))?;
        }
        Ok(())
    };
    write().with_context(|| format!("cannot write the recipes to {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recipe_that_comes_along_can_be_read() {
        let home = tempfile::tempdir().unwrap();
        assert!(ALL.iter().any(|(name, _)| *name == "claude"), "the default image has a recipe");
        for (name, _) in ALL {
            let recipe = harvest_engine::Recipe::read(&find(home.path(), name).unwrap()).unwrap();
            assert_eq!(recipe.name, *name);
        }
    }

    #[test]
    fn an_unknown_recipe_is_answered_with_those_there_are() {
        let error = find(Path::new("/nonexistent"), "cluade").unwrap_err();
        assert!(crate::printer::hint_of(&error).unwrap().contains("claude"));
    }
}
