//! Recipes: what an image is made of, written in TOML, and the keys by which its steps are known.
//! Reads and names; builds nothing.
//!
//! ```toml
//! name = "tools"
//! from = { debian = "bookworm", include = ["git"] }
//! # or "another-image", { folder = "rootfs" }, { tar = "rootfs.tar.gz" }, { oci = "registry.example.com/name:tag" }
//!
//! [[step]]
//! apt = ["jq"]
//!
//! [[step]]
//! run = "useradd --uid 10001 harvest"
//! ```

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    os::fd::{AsFd, BorrowedFd},
    path::{Component, Path, PathBuf},
};

use ring::digest::{Context, SHA256};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use serde::Serialize;
use toml::{Table, Value};

use crate::{
    EngineError,
    disk::{disk_error, hex},
    tree,
};

// Raised when the same recipe must give another image: other steps behind a word, other clean-up.
const FORMAT_VERSION: u32 = 2;

/// What an image is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// The image's name.
    pub name: String,
    /// What it starts from.
    pub from: Base,
    /// What is done to that, in order.
    pub steps: Vec<Make>,
    /// Where the recipe is: paths in it start here.
    pub folder: PathBuf,
}

/// What an image starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Base {
    /// Another image.
    Image(String),
    /// A Debian of this suite with these packages, off the host's own mirror.
    Debian {
        /// `bookworm`.
        suite: String,
        /// Packages besides the essential ones.
        include: Vec<String>,
    },
    /// A folder with a root file system.
    Folder(PathBuf),
    /// An archive of a root file system, plain or compressed with gzip or zstd.
    Tar(PathBuf),
    /// An image in a registry.
    Oci(String),
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Make {
    /// Install Debian packages.
    Apt(Vec<String>),
    /// Install npm packages for everyone.
    Npm(Vec<String>),
    /// Install Python packages for everyone.
    Pip(Vec<String>),
    /// Run a shell command.
    Run(String),
    /// Copy a file, or what is in a folder.
    Copy {
        /// Where from, beginning at the recipe's folder.
        from: PathBuf,
        /// Where to, inside.
        to: PathBuf,
    },
    /// Set variables, for later steps and for whoever uses the image.
    Env(BTreeMap<String, String>),
    /// Who commands run as.
    User(String),
    /// Where commands run.
    Workdir(String),
}

/// Why a text is no recipe.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// It cannot be read.
    #[error("cannot read the recipe {}", path.display())]
    Read {
        /// Its file.
        path: PathBuf,
        /// What the file said.
        source: io::Error,
    },
    /// It is not TOML.
    #[error("the recipe is not TOML")]
    Toml(#[from] toml::de::Error),
    /// A key nobody knows.
    #[error("{place} has the unknown key `{key}`; did you mean `{nearest}`?")]
    UnknownKey {
        /// Where.
        place: String,
        /// The key.
        key: String,
        /// The known key most like it.
        nearest: String,
    },
    /// A key that must be there is not.
    #[error("{place} lacks `{key}`")]
    MissingKey {
        /// Where.
        place: String,
        /// The key.
        key: &'static str,
    },
    /// A value that makes no sense.
    #[error("`{key}` in {place} must be {wanted}")]
    Value {
        /// Where.
        place: String,
        /// The key.
        key: String,
        /// What it must be.
        wanted: &'static str,
    },
}

const RECIPE_KEYS: [&str; 3] = ["name", "from", "step"];
const STEP_KEYS: [&str; 8] = ["apt", "npm", "pip", "run", "copy", "env", "user", "workdir"];

impl Recipe {
    /// Reads a recipe from its file.
    ///
    /// # Errors
    /// When the file cannot be read or is no recipe.
    pub fn read(path: &Path) -> Result<Self, RecipeError> {
        let failed = |source| RecipeError::Read { path: path.to_owned(), source };
        let text = fs::read_to_string(path).map_err(failed)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Self::parse(&text, folder)
    }

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
            return Err(
                top.wrong("name", "lower-case letters, digits, `-`, `_` and `.`, a letter or digit first")
            );
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
                Err(RecipeError::UnknownKey { place: self.place.clone(), key: key.clone(), nearest })
            }
        }
    }

    fn wrong(&self, key: &str, wanted: &'static str) -> RecipeError {
        RecipeError::Value { place: self.place.clone(), key: key.to_owned(), wanted }
    }

    fn text(&self, key: &'static str) -> Result<String, RecipeError> {
        match self.table.get(key) {
            Some(Value::String(text)) if !text.is_empty() && !text.contains('\0') => Ok(text.clone()),
            Some(_) => Err(self.wrong(key, "a text")),
            None => Err(RecipeError::MissingKey { place: self.place.clone(), key }),
        }
    }

    // A package that begins with a dash would be an option of the installer.
    fn packages(&self, key: &'static str) -> Result<Vec<String>, RecipeError> {
        let wanted = "a list of package names";
        let Some(Value::Array(values)) = self.table.get(key) else { return Err(self.wrong(key, wanted)) };
        let name = |value: &Value| {
            value.as_str().filter(|name| !name.is_empty() && !name.starts_with('-')).map(str::to_owned)
        };
        let names: Option<Vec<String>> = values.iter().map(name).collect();
        names.filter(|names| !names.is_empty()).ok_or_else(|| self.wrong(key, wanted))
    }

    fn absolute(&self, key: &'static str) -> Result<PathBuf, RecipeError> {
        let path = PathBuf::from(self.text(key)?);
        let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if path.is_absolute() && plain {
            Ok(path)
        } else {
            Err(self.wrong(key, "an absolute path without `..`"))
        }
    }

    // Whoever builds a recipe from elsewhere must not have files from beside it copied in.
    fn inside(&self, key: &'static str) -> Result<PathBuf, RecipeError> {
        let path = PathBuf::from(self.text(key)?);
        let plain = path.components().all(|part| matches!(part, Component::CurDir | Component::Normal(_)));
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
            let kind = ["debian", "folder", "tar", "oci"].into_iter().find(|kind| table.contains_key(*kind));
            match kind {
                Some("debian") if table.keys().all(|key| key == "debian" || key == "include") => {
                    parse_debian(&reader)
                }
                Some("folder") if table.len() == 1 => Ok(Base::Folder(reader.text("folder")?.into())),
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
        return Err(RecipeError::Value { place, key: "step".to_owned(), wanted: "a table under `[[step]]`" });
    };
    let reader = Reader { place, table };
    reader.only(&STEP_KEYS)?;
    let mut keys = table.keys();
    let (Some(key), None) = (keys.next(), keys.next()) else {
        return Err(reader.wrong("step", "exactly one of apt, npm, pip, run, copy, env, user, workdir"));
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
    let Some(Value::Table(table)) = reader.table.get("env") else { return Err(reader.wrong("env", wanted)) };
    let pair = |(name, value): (&String, &Value)| {
        let value = value.as_str().filter(|value| !value.contains('\0'))?;
        (!name.is_empty() && !name.contains(['=', '\0'])).then(|| (name.clone(), value.to_owned()))
    };
    let env: Option<BTreeMap<String, String>> = table.iter().map(pair).collect();
    env.filter(|env| !env.is_empty()).map(Make::Env).ok_or_else(|| reader.wrong("env", wanted))
}

// Levenshtein's distance, two rows at a time.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, left) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for (column, right) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(left != *right);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

/// The key of something made on top of `parent`: the same for the same words on the same ground.
pub(crate) fn key(parent: &str, what: &impl Serialize, content: &str) -> String {
    let mut hash = Context::new(&SHA256);
    let what = serde_json::to_vec(what).expect("recipes hold only maps with text keys");
    // Lengths first, so that no text can pass for another split elsewhere.
    for part in [&FORMAT_VERSION.to_le_bytes()[..], parent.as_bytes(), &what, content.as_bytes()] {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(hash.finish().as_ref())
}

/// A key of everything in a file or folder that a copy of it keeps.
pub(crate) fn content_key(path: &Path) -> Result<String, EngineError> {
    let mut hash = Context::new(&SHA256);
    let meta = fs::symlink_metadata(path).map_err(|e| disk_error("read", path, e))?;
    if meta.is_dir() {
        tree::visit(path, &mut |name, folder, stat| {
            hash_one(&mut hash, name, folder, stat).map_err(|e| disk_error("read", path.join(name), e))
        })?;
    } else {
        let folder = tree::open_root(path.parent().unwrap_or(Path::new(".")))?;
        let name = Path::new(path.file_name().unwrap_or_default());
        let stat = rustix::fs::lstat(path).map_err(|e| disk_error("read", path, e))?;
        hash_one(&mut hash, name, folder.as_fd(), &stat).map_err(|e| disk_error("read", path, e))?;
    }
    Ok(hex(hash.finish().as_ref()))
}

fn hash_one(hash: &mut Context, path: &Path, folder: BorrowedFd<'_>, stat: &Stat) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default();
    let path = path.as_os_str().as_encoded_bytes();
    hash.update(&(path.len() as u64).to_le_bytes());
    hash.update(path);
    for number in [stat.st_mode, stat.st_uid, stat.st_gid] {
        hash.update(&number.to_le_bytes());
    }
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => {
            hash.update(rustix::fs::readlinkat(folder, name, Vec::new())?.as_bytes_with_nul());
        }
        FileType::RegularFile => {
            hash.update(&stat.st_size.to_le_bytes());
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let mut file = File::from(rustix::fs::openat(folder, name, flags, Mode::empty())?);
            let mut buffer = vec![0; 1 << 16];
            loop {
                match file.read(&mut buffer)? {
                    0 => break,
                    length => hash.update(&buffer[..length]),
                }
            }
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Recipe, RecipeError> {
        Recipe::parse(text, Path::new("."))
    }

    fn step(line: &str) -> Result<Recipe, RecipeError> {
        parse(&format!("name = \"x\"\nfrom = \"base\"\n[[step]]\n{line}"))
    }

    #[test]
    fn a_whole_recipe_is_read() {
        let text = r#"
            name = "tools"
            from = { debian = "bookworm", include = ["git", "curl", "git"] }
            [[step]]
            apt = ["jq"]
            [[step]]
            copy = { from = "files", to = "/app" }
            [[step]]
            env = { LANG = "C.UTF-8" }
            [[step]]
            user = "harvest"
            [[step]]
            workdir = "/workspace"
        "#;
        let recipe = parse(text).unwrap();
        let include = vec!["curl".to_owned(), "git".to_owned()];
        assert_eq!(recipe.from, Base::Debian { suite: "bookworm".to_owned(), include });
        assert_eq!(recipe.steps.len(), 5);
        assert_eq!(recipe.steps[1], Make::Copy { from: "files".into(), to: "/app".into() });
    }

    #[test]
    fn an_unknown_key_is_named_with_the_nearest_known_one() {
        let said = |result: Result<Recipe, RecipeError>| result.unwrap_err().to_string();
        assert_eq!(
            said(parse("nmae = \"x\"")),
            "the recipe has the unknown key `nmae`; did you mean `name`?"
        );
        assert_eq!(
            said(step("workdri = \"/\"")),
            "step 1 has the unknown key `workdri`; did you mean `workdir`?"
        );
        assert_eq!(
            said(parse("name = \"x\"\nfrom = { debain = \"bookworm\" }")),
            "`from` has the unknown key `debain`; did you mean `debian`?"
        );
    }

    #[test]
    fn an_image_starts_from_one_thing() {
        let from = |table: &str| parse(&format!("name = \"x\"\nfrom = {table}")).map(|recipe| recipe.from);
        assert_eq!(from("{ tar = \"a.tar.gz\" }").unwrap(), Base::Tar("a.tar.gz".into()));
        assert_eq!(from("{ oci = \"r.test/a:1\" }").unwrap(), Base::Oci("r.test/a:1".to_owned()));
        for wrong in [
            "{ tar = \"a\", folder = \"b\" }",
            "{ debian = \"bookworm\", oci = \"r.test/a\" }",
            "{ oci = \"debian\" }",
            "{ include = [\"a\"] }",
        ] {
            assert!(from(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for line in [
            "apt = []",
            "apt = [\"-o=x\"]",
            "npm = \"one\"",
            "run = 1",
            "copy = { from = \"../../etc\", to = \"/x\" }",
            "copy = { from = \"/etc\", to = \"/x\" }",
            "copy = { from = \"a\", to = \"x\" }",
            "copy = { from = \"a\", to = \"/x/../../y\" }",
            "env = { \"A=B\" = \"c\" }",
            "user = \"somebody\"",
            "workdir = \"relative\"",
            "run = \"a\"\napt = [\"b\"]",
            "",
        ] {
            assert!(step(line).is_err(), "{line}");
        }
        for name in ["", "../x", "A", ".x", "a/b"] {
            assert!(parse(&format!("name = \"{name}\"\nfrom = \"base\"")).is_err(), "{name}");
        }
    }

    #[test]
    fn a_key_is_stable_and_feels_every_part() {
        let run = |text: &str| Make::Run(text.to_owned());
        let one = key("parent", &run("a"), "");
        assert_eq!(one, key("parent", &run("a"), ""));
        for other in [
            key("parens", &run("a"), ""),
            key("parent", &run("b"), ""),
            key("parent", &run("a"), "c"),
            key("parent", &Make::User("a".to_owned()), ""),
        ] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn a_content_key_feels_content_names_modes_and_links() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mut seen = Vec::new();
        let mut look = || seen.push(content_key(folder.path()).unwrap());
        look();
        fs::write(at("a"), "1").unwrap();
        look();
        fs::write(at("a"), "2").unwrap();
        look();
        fs::rename(at("a"), at("b")).unwrap();
        look();
        fs::set_permissions(at("b"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        look();
        std::os::unix::fs::symlink("b", at("c")).unwrap();
        look();
        let different: std::collections::HashSet<_> = seen.iter().collect();
        assert_eq!(different.len(), seen.len());
        assert_eq!(content_key(folder.path()).unwrap(), *seen.last().unwrap());
    }
}
