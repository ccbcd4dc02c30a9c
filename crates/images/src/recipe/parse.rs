//! Parses recipes: checks every key and value, and names the part of the recipe in each error.

use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

use harvest_engine::is_image_name;
use harvest_proto::suggest::edit_distance;
use toml::{Table, Value};

use super::{Base, Recipe, RecipeError, RecipeStep};

const RECIPE_KEYS: [&str; 5] = ["name", "from", "step", "network", "allow"];
const PACKAGES: &str = "a list of package names";
const STEP_KEYS: [&str; 8] = ["apt", "npm", "pip", "run", "copy", "env", "user", "workdir"];

impl Recipe {
    /// Parses a recipe whose relative paths start at `folder`.
    ///
    /// # Errors
    /// When the recipe is invalid; the error names the key.
    pub fn parse(text: &str, folder: &Path) -> Result<Self, RecipeError> {
        let table: Table = text.parse()?;
        let top = TableReader { section: "the recipe".to_owned(), table: &table };
        top.check_keys(&RECIPE_KEYS)?;
        let name = top.text("name")?;
        if !is_image_name(&name) {
            return Err(top.invalid(
                "name",
                "lower-case letters, digits, `-`, `_` and `.`, beginning with a letter or digit",
            ));
        }
        let steps = match table.get("step") {
            None => Vec::new(),
            Some(Value::Array(steps)) => steps
                .iter()
                .enumerate()
                .map(|(at, step)| parse_step(at + 1, step))
                .collect::<Result<_, _>>()?,
            Some(_) => return Err(top.invalid("step", "an array of tables: `[[step]]`")),
        };
        let host_network = match table.get("network").map(Value::as_str) {
            None => false,
            Some(Some("host")) => true,
            Some(_) => return Err(top.invalid("network", "`host`; package registries need none")),
        };
        let allow = match table.get("allow") {
            None => Vec::new(),
            Some(_) => top.packages("allow", "a list of host names")?,
        };
        let (from, folder) = (parse_base(&top)?, folder.to_owned());
        Ok(Self { name, from, steps, host_network, allow, folder })
    }
}

/// Reads values of one table.
struct TableReader<'a> {
    /// The part of the recipe that the table is, for errors.
    section: String,
    table: &'a Table,
}

impl TableReader<'_> {
    fn check_keys(&self, known: &[&str]) -> Result<(), RecipeError> {
        match self.table.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => {
                let nearest = known.iter().min_by_key(|candidate| edit_distance(key, candidate));
                let nearest = nearest.map_or_else(String::new, |nearest| (*nearest).to_owned());
                Err(RecipeError::UnknownKey {
                    section: self.section.clone(),
                    key: key.clone(),
                    nearest,
                })
            }
        }
    }

    fn invalid(&self, key: &str, expected: &'static str) -> RecipeError {
        RecipeError::Value { section: self.section.clone(), key: key.to_owned(), expected }
    }

    fn text(&self, key: &'static str) -> Result<String, RecipeError> {
        match self.table.get(key) {
            Some(Value::String(text)) if !text.is_empty() && !text.contains('\0') => {
                Ok(text.clone())
            }
            Some(_) => Err(self.invalid(key, "a string that is not empty")),
            None => Err(RecipeError::MissingKey { section: self.section.clone(), key }),
        }
    }

    // A package name that begins with a dash would be an option of the installer.
    fn packages(
        &self,
        key: &'static str,
        expected: &'static str,
    ) -> Result<Vec<String>, RecipeError> {
        let Some(Value::Array(values)) = self.table.get(key) else {
            return Err(self.invalid(key, expected));
        };
        let name = |value: &Value| {
            value
                .as_str()
                .filter(|name| !name.is_empty() && !name.starts_with('-'))
                .map(str::to_owned)
        };
        let names: Option<Vec<String>> = values.iter().map(name).collect();
        names.filter(|names| !names.is_empty()).ok_or_else(|| self.invalid(key, expected))
    }

    fn absolute(&self, key: &'static str) -> Result<PathBuf, RecipeError> {
        let path = PathBuf::from(self.text(key)?);
        let plain =
            path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if path.is_absolute() && plain {
            Ok(path)
        } else {
            Err(self.invalid(key, "an absolute path without `..`"))
        }
    }

    // A recipe from elsewhere must not copy files of this host from outside its folder.
    fn relative(&self, key: &'static str) -> Result<PathBuf, RecipeError> {
        let path = PathBuf::from(self.text(key)?);
        let plain =
            path.components().all(|part| matches!(part, Component::CurDir | Component::Normal(_)));
        if plain {
            Ok(path)
        } else {
            Err(self.invalid(key, "a relative path inside the recipe's folder"))
        }
    }
}

fn parse_base(top: &TableReader<'_>) -> Result<Base, RecipeError> {
    let expected = "an image's name, { debian = \"…\", include = […] }, { folder = \"…\" }, \
                    { tar = \"…\" } or { oci = \"…\" }";
    match top.table.get("from") {
        Some(Value::String(name)) if is_image_name(name) => Ok(Base::Image(name.clone())),
        Some(Value::Table(table)) => {
            let reader = TableReader { section: "`from`".to_owned(), table };
            reader.check_keys(&["debian", "include", "folder", "tar", "oci"])?;
            let kind = ["debian", "folder", "tar", "oci"]
                .into_iter()
                .find(|kind| table.contains_key(*kind));
            match kind {
                Some("debian") if table.keys().all(|key| key == "debian" || key == "include") => {
                    parse_debian(&reader)
                }
                Some("folder") if table.len() == 1 => {
                    Ok(Base::Folder(reader.text("folder")?.into()))
                }
                Some("tar") if table.len() == 1 => Ok(Base::Tar(reader.text("tar")?.into())),
                Some("oci") if table.len() == 1 => {
                    let text = reader.text("oci")?;
                    let good = text.parse::<crate::oci::Reference>().is_ok();
                    let expected =
                        "an image in a registry, such as `registry.example.com/debian:12`";
                    if good { Ok(Base::Oci(text)) } else { Err(reader.invalid("oci", expected)) }
                }
                _ => Err(top.invalid("from", expected)),
            }
        }
        Some(_) => Err(top.invalid("from", expected)),
        None => Err(RecipeError::MissingKey { section: top.section.clone(), key: "from" }),
    }
}

fn parse_debian(reader: &TableReader<'_>) -> Result<Base, RecipeError> {
    let suite = reader.text("debian")?;
    if !suite.bytes().all(|byte| byte.is_ascii_lowercase()) {
        return Err(reader.invalid("debian", "a suite's name such as `bookworm`"));
    }
    let mut include = if reader.table.contains_key("include") {
        reader.packages("include", PACKAGES)?
    } else {
        Vec::new()
    };
    // The list becomes one comma-separated argument of mmdebstrap.
    if include.iter().any(|name| name.contains([',', ' ', '/'])) {
        return Err(reader.invalid("include", "a list of package names"));
    }
    include.sort();
    include.dedup();
    Ok(Base::Debian { suite, include })
}

fn parse_step(number: usize, step: &Value) -> Result<RecipeStep, RecipeError> {
    let section = format!("step {number}");
    let Value::Table(table) = step else {
        return Err(RecipeError::Value {
            section,
            key: "step".to_owned(),
            expected: "a table under `[[step]]`",
        });
    };
    let reader = TableReader { section, table };
    reader.check_keys(&STEP_KEYS)?;
    let mut keys = table.keys();
    let (Some(key), None) = (keys.next(), keys.next()) else {
        return Err(
            reader.invalid("step", "exactly one of apt, npm, pip, run, copy, env, user, workdir")
        );
    };
    match key.as_str() {
        "apt" => Ok(RecipeStep::Apt(reader.packages("apt", PACKAGES)?)),
        "npm" => Ok(RecipeStep::Npm(reader.packages("npm", PACKAGES)?)),
        "pip" => Ok(RecipeStep::Pip(reader.packages("pip", PACKAGES)?)),
        "run" => Ok(RecipeStep::Run(reader.text("run")?)),
        "copy" => parse_copy(&reader),
        "env" => parse_env(&reader),
        "user" => {
            let user = reader.text("user")?;
            let known = matches!(user.as_str(), "root" | "harvest") || user.parse::<u16>().is_ok();
            if known {
                Ok(RecipeStep::User(user))
            } else {
                Err(reader.invalid("user", "`root`, `harvest` or a number below 65536"))
            }
        }
        _ => Ok(RecipeStep::Workdir(reader.absolute("workdir")?.to_string_lossy().into_owned())),
    }
}

fn parse_copy(reader: &TableReader<'_>) -> Result<RecipeStep, RecipeError> {
    let Some(Value::Table(table)) = reader.table.get("copy") else {
        return Err(reader.invalid("copy", "{ from = \"…\", to = \"…\" }"));
    };
    let inner = TableReader { section: format!("`copy` of {}", reader.section), table };
    inner.check_keys(&["from", "to"])?;
    Ok(RecipeStep::Copy { from: inner.relative("from")?, to: inner.absolute("to")? })
}

fn parse_env(reader: &TableReader<'_>) -> Result<RecipeStep, RecipeError> {
    let expected = "a table of strings whose names have no `=`";
    let Some(Value::Table(table)) = reader.table.get("env") else {
        return Err(reader.invalid("env", expected));
    };
    let pair = |(name, value): (&String, &Value)| {
        let value = value.as_str().filter(|value| !value.contains('\0'))?;
        (!name.is_empty() && !name.contains(['=', '\0'])).then(|| (name.clone(), value.to_owned()))
    };
    let env: Option<BTreeMap<String, String>> = table.iter().map(pair).collect();
    env.filter(|env| !env.is_empty())
        .map(RecipeStep::Env)
        .ok_or_else(|| reader.invalid("env", expected))
}
