//! A recipe's text made a [`Recipe`]: every key known, every value checked, each error with its place.

use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

use harvest_proto::nearest::distance;
use toml::{Table, Value};

use super::{Base, Make, Recipe, RecipeError};

const RECIPE_KEYS: [&str; 3] = ["name", "from", "step"];
const STEP_KEYS: [&str; 8] = ["apt", "npm", "pip", "run", "copy", "env", "user", "workdir"];

impl Recipe {
    /// Parses a recipe whose paths start at `folder`.
    ///
    /// # Errors
    /// When it is none; the error names the key.
    pub fn parse(text: &str, folder: &Path) -> Result<Self, RecipeError> {
        let table: Table = text.parse()?;
        let top = Reader { place: "the recipe".to_owned(), table: &table };
        top.only(&RECIPE_KEYS)?;
        let name = top.text("name")?;
        if !is_image_name(&name) {
            return Err(top.wrong(
                "name",
                "lower-case letters, digits, `-`, `_` and `.`, a letter or digit first",
            ));
        }
        let steps = match table.get("step") {
            None => Vec::new(),
            Some(Value::Array(steps)) => steps
                .iter()
                .enumerate()
                .map(|(at, step)| parse_step(at + 1, step))
                .collect::<Result<_, _>>()?,
            Some(_) => return Err(top.wrong("step", "tables, each under `[[step]]`")),
        };
        Ok(Self { name, from: parse_base(&top)?, steps, folder: folder.to_owned() })
    }
}

/// Whether a text can name an image, and its record's file.
pub(crate) fn is_image_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    name.len() <= 64
        && name.bytes().next().is_some_and(plain)
        && name.bytes().all(|byte| plain(byte) || matches!(byte, b'-' | b'_' | b'.'))
}

/// A table, and where it stands.
struct Reader<'a> {
    place: String,
    table: &'a Table,
}

impl Reader<'_> {
    fn only(&self, known: &[&str]) -> Result<(), RecipeError> {
        match self.table.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => {
                let nearest = known.iter().min_by_key(|candidate| distance(key, candidate));
                let nearest = nearest.map_or_else(String::new, |nearest| (*nearest).to_owned());
                Err(RecipeError::UnknownKey {
                    place: self.place.clone(),
                    key: key.clone(),
                    nearest,
                })
            }
        }
    }

    fn wrong(&self, key: &str, wanted: &'static str) -> RecipeError {
        RecipeError::Value { place: self.place.clone(), key: key.to_owned(), wanted }
    }

    fn text(&self, key: &'static str) -> Result<String, RecipeError> {
        match self.table.get(key) {
            Some(Value::String(text)) if !text.is_empty() && !text.contains('\0') => {
                Ok(text.clone())
            }
            Some(_) => Err(self.wrong(key, "a text")),
            None => Err(RecipeError::MissingKey { place: self.place.clone(), key }),
        }
    }

    // A package that begins with a dash would be an option of the installer.
    fn packages(&self, key: &'static str) -> Result<Vec<String>, RecipeError> {
        let wanted = "a list of package names";
        let Some(Value::Array(values)) = self.table.get(key) else {
            return Err(self.wrong(key, wanted));
        };
        let name = |value: &Value| {
            value
                .as_str()
                .filter(|name| !name.is_empty() && !name.starts_with('-'))
                .map(str::to_owned)
        };
        let names: Option<Vec<String>> = values.iter().map(name).collect();
        names.filter(|names| !names.is_empty()).ok_or_else(|| self.wrong(key, wanted))
    }

    fn absolute(&self, key: &'static str) -> Result<PathBuf, RecipeError> {
        let path = PathBuf::from(self.text(key)?);
        let plain =
            path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if path.is_absolute() && plain {
            Ok(path)
        } else {
            Err(self.wrong(key, "an absolute path without `..`"))
        }
    }

    // Whoever builds a recipe from elsewhere must not have files from beside it copied in.
    fn inside(&self, key: &'static str) -> Result<PathBuf, RecipeError> {
        let path = PathBuf::from(self.text(key)?);
        let plain =
            path.components().all(|part| matches!(part, Component::CurDir | Component::Normal(_)));
        if plain { Ok(path) } else { Err(self.wrong(key, "a path below the recipe's folder")) }
    }
}

fn parse_base(top: &Reader<'_>) -> Result<Base, RecipeError> {
    let wanted = "an image's name, { debian = \"…\", include = […] }, { folder = \"…\" }, { tar = \"…\" } or { oci = \"…\" }";
    match top.table.get("from") {
        Some(Value::String(name)) if is_image_name(name) => Ok(Base::Image(name.clone())),
        Some(Value::Table(table)) => {
            let reader = Reader { place: "`from`".to_owned(), table };
            reader.only(&["debian", "include", "folder", "tar", "oci"])?;
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
                    let wanted = "an image in a registry, such as `registry.example.com/debian:12`";
                    if good { Ok(Base::Oci(text)) } else { Err(reader.wrong("oci", wanted)) }
                }
                _ => Err(top.wrong("from", wanted)),
            }
        }
        Some(_) => Err(top.wrong("from", wanted)),
        None => Err(RecipeError::MissingKey { place: top.place.clone(), key: "from" }),
    }
}

fn parse_debian(reader: &Reader<'_>) -> Result<Base, RecipeError> {
    let suite = reader.text("debian")?;
    if !suite.bytes().all(|byte| byte.is_ascii_lowercase()) {
        return Err(reader.wrong("debian", "a suite's name such as `bookworm`"));
    }
    let mut include =
        if reader.table.contains_key("include") { reader.packages("include")? } else { Vec::new() };
    // A list that becomes one argument, so a comma or a blank would make two names of one.
    if include.iter().any(|name| name.contains([',', ' ', '/'])) {
        return Err(reader.wrong("include", "a list of package names"));
    }
    include.sort();
    include.dedup();
    Ok(Base::Debian { suite, include })
}

fn parse_step(number: usize, step: &Value) -> Result<Make, RecipeError> {
    let place = format!("step {number}");
    let Value::Table(table) = step else {
        return Err(RecipeError::Value {
            place,
            key: "step".to_owned(),
            wanted: "a table under `[[step]]`",
        });
    };
    let reader = Reader { place, table };
    reader.only(&STEP_KEYS)?;
    let mut keys = table.keys();
    let (Some(key), None) = (keys.next(), keys.next()) else {
        return Err(
            reader.wrong("step", "exactly one of apt, npm, pip, run, copy, env, user, workdir")
        );
    };
    match key.as_str() {
        "apt" => Ok(Make::Apt(reader.packages("apt")?)),
        "npm" => Ok(Make::Npm(reader.packages("npm")?)),
        "pip" => Ok(Make::Pip(reader.packages("pip")?)),
        "run" => Ok(Make::Run(reader.text("run")?)),
        "copy" => parse_copy(&reader),
        "env" => parse_env(&reader),
        "user" => {
            let user = reader.text("user")?;
            let known = matches!(user.as_str(), "root" | "harvest") || user.parse::<u16>().is_ok();
            if known {
                Ok(Make::User(user))
            } else {
                Err(reader.wrong("user", "`root`, `harvest` or a number below 65536"))
            }
        }
        _ => Ok(Make::Workdir(reader.absolute("workdir")?.to_string_lossy().into_owned())),
    }
}

fn parse_copy(reader: &Reader<'_>) -> Result<Make, RecipeError> {
    let Some(Value::Table(table)) = reader.table.get("copy") else {
        return Err(reader.wrong("copy", "{ from = \"…\", to = \"…\" }"));
    };
    let inner = Reader { place: format!("`copy` of {}", reader.place), table };
    inner.only(&["from", "to"])?;
    Ok(Make::Copy { from: inner.inside("from")?, to: inner.absolute("to")? })
}

fn parse_env(reader: &Reader<'_>) -> Result<Make, RecipeError> {
    let wanted = "a table of texts, named without `=`";
    let Some(Value::Table(table)) = reader.table.get("env") else {
        return Err(reader.wrong("env", wanted));
    };
    let pair = |(name, value): (&String, &Value)| {
        let value = value.as_str().filter(|value| !value.contains('\0'))?;
        (!name.is_empty() && !name.contains(['=', '\0'])).then(|| (name.clone(), value.to_owned()))
    };
    let env: Option<BTreeMap<String, String>> = table.iter().map(pair).collect();
    env.filter(|env| !env.is_empty()).map(Make::Env).ok_or_else(|| reader.wrong("env", wanted))
}
