//! Puts what a folder holds on the local forge and registers it: for work without an account anywhere.
//! The folder itself is only read; see the forge's `take`.

use std::{
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use harvest_github::{Forge, ForgeError, TakeError, Taken};
use harvest_proto::{
    Secret,
    api::{AddRepository, Repository},
};

use crate::{
    Invocation,
    client::{self, Client},
    printer::{Advice, Printer},
    wire,
};

// How often to look whether the forge is free: a registration takes as long as its folder takes to copy.
const HELD_LOOK: Duration = Duration::from_millis(50);

/// What became of a folder.
pub(crate) struct Published {
    pub(crate) repository: Repository,
    /// The branch that is checked out in it.
    pub(crate) branch: String,
    /// Whether it is registered now for the first time.
    pub(crate) new: bool,
}

/// What to do when another repository has the folder's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Say so.
    Strict,
    /// Put a number behind it.
    Numbered,
}

/// The forge of the server on this machine.
pub(crate) fn forge(here: &Invocation) -> Result<Forge> {
    let server = client::local(&here.config)
        .context("a folder can only be worked on by a server on its own machine")?;
    Ok(Forge::open(here.config.home.join("forge"), &format!("{}/forge", server.url))?)
}

/// Copies what `folder` holds to the forge and registers it there; one that was copied before is brought
/// up to date.
pub(crate) async fn publish(
    print: Printer,
    client: &Client,
    forge: &Forge,
    (folder, naming): (&Path, Naming),
    mut add: AddRepository,
) -> Result<Published> {
    let folder =
        folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))?;
    let known = client.repositories().await?;
    if let Some(before) = known.iter().find(|known| is_copy(forge, known, &folder, &add)) {
        return renew(print, forge, before, &folder, &add).await;
    }
    // From the name that is free to the token that goes with it, others wait: of two that registered the same
    // folder at once, each would leave a token the other does not know.
    let _held = hold(forge).await?;
    let known = client.repositories().await?;
    if let Some(before) = known.iter().find(|known| is_copy(forge, known, &folder, &add)) {
        return renew(print, forge, before, &folder, &add).await;
    }
    let name = match add.name.take() {
        Some(name) => name,
        None => free_name(&folder_name(&folder), naming, &known),
    };
    if known.iter().any(|known| known.name == name) {
        bail!(Advice::new(
            format!("there is a repository `{name}` already"),
            "choose another with --name"
        ));
    }
    let (token, taken) = copy(forge, &name, &folder).await?;
    let secret = secret_name(&name, &known);
    client.secret_set(&secret, &token).await?;
    tell(print, &name, &taken.notes);
    let request = AddRepository {
        url: forge.url(&name),
        name: Some(name),
        base: add.base.or_else(|| Some(taken.branch.clone())),
        secret: Some(secret),
        image: add.image,
    };
    let repository =
        client.repository_add(&request).await.context("cannot register the repository")?;
    Ok(Published { repository, branch: taken.branch, new: true })
}

/// Brings a copy that is registered already up to date.
async fn renew(
    print: Printer,
    forge: &Forge,
    before: &Repository,
    folder: &Path,
    add: &AddRepository,
) -> Result<Published> {
    if add.base.is_some() || add.image.is_some() {
        let message = format!("the folder is registered already, as {}", before.name);
        bail!(Advice::new(
            message,
            format!("`harvest repo rm {}` forgets that first", before.name)
        ));
    }
    let Taken { branch, notes, .. } = take(forge, &before.name, folder).await?;
    tell(print, &before.name, &notes);
    Ok(Published { repository: before.clone(), branch, new: false })
}

/// The forge, once nobody else registers anything on it.
async fn hold(forge: &Forge) -> Result<std::fs::File> {
    loop {
        if let Some(held) = forge.hold().context("cannot hold the local forge")? {
            return Ok(held);
        }
        tokio::time::sleep(HELD_LOOK).await;
    }
}

/// Whether it was made from this folder, and nobody asked for another name.
fn is_copy(forge: &Forge, known: &Repository, folder: &Path, add: &AddRepository) -> bool {
    let named = add.name.as_ref().is_none_or(|name| *name == known.name);
    let source = forge.owns(&known.url).and_then(|name| forge.source(&name));
    named && source.as_deref() == Some(folder)
}

/// A new repository of the forge with what the folder holds.
async fn copy(forge: &Forge, name: &str, folder: &Path) -> Result<(Secret<String>, Taken)> {
    let token = Secret::new(wire::random_token());
    let made = forge.create(name, &token).await;
    let made = match made {
        // An earlier try got as far as this.
        Err(ForgeError::Exists { .. }) => forge.set_token(name, &token).map(|()| false),
        other => other.map(|_| true),
    };
    let made = made.context("cannot make a repository on the local forge")?;
    match take(forge, name, folder).await {
        Ok(taken) => Ok((token, taken)),
        Err(error) => {
            if made {
                // Nobody knows of it yet.
                let _ = forge.remove(name);
            }
            Err(error)
        }
    }
}

async fn take(forge: &Forge, name: &str, folder: &Path) -> Result<Taken> {
    tokio::select! {
        taken = forge.take(name, folder) => taken.map_err(|error: TakeError| {
            let advice = Advice::new(error.to_string(), error.hint());
            match std::error::Error::source(&error) {
                Some(_) => anyhow::Error::new(error).context(advice),
                None => advice.into(),
            }
        }),
        _ = tokio::signal::ctrl_c() => bail!("interrupted while {} was being copied", folder.display()),
    }
}

fn tell(print: Printer, name: &str, notes: &[String]) {
    for note in notes {
        print.warn(format!("{name}: {note}"));
    }
}

/// The folder's own name, as far as a repository may have it.
fn folder_name(folder: &Path) -> String {
    let sound = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let name =
        folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name: String =
        name.chars().map(|letter| if sound(letter) { letter } else { '-' }).take(90).collect();
    let name = name.trim_matches(['-', '.']).trim_end_matches(".git");
    if name.is_empty() { "folder".to_owned() } else { name.to_owned() }
}

fn free_name(name: &str, naming: Naming, known: &[Repository]) -> String {
    let free =
        |name: &String| naming == Naming::Strict || !known.iter().any(|known| known.name == *name);
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    let mut names = std::iter::once(name.to_owned()).chain(numbered);
    names.find(free).expect("there are more numbers than repositories")
}

/// Secrets are named in capitals, so that names that differ may come to the same: the second gets a number,
/// for what is set under a name replaces what was there.
fn secret_name(repository: &str, known: &[Repository]) -> String {
    let letter = |letter: char| {
        if letter.is_ascii_alphanumeric() { letter.to_ascii_uppercase() } else { '_' }
    };
    let name = format!("FORGE_{}", repository.chars().map(letter).collect::<String>());
    let taken = |name: &str| {
        known.iter().any(|known| known.name != repository && known.secret.as_deref() == Some(name))
    };
    let numbered = (2..).map(|number| format!("{name}_{number}"));
    let mut names = std::iter::once(name.clone()).chain(numbered);
    names.find(|name| !taken(name)).expect("there are more numbers than repositories")
}

/// The git repository that holds `folder`, if it is this user's: what others left further up is not meant.
pub(crate) fn enclosing(folder: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::MetadataExt as _;
    let ours = rustix::process::geteuid().as_raw();
    let sudo = crate::config::process_env("SUDO_UID").and_then(|uid| uid.parse().ok());
    let found = folder.ancestors().find(|folder| folder.join(".git").exists())?;
    let owner = std::fs::symlink_metadata(found.join(".git")).ok()?.uid();
    (owner == ours || Some(owner) == sudo).then(|| found.to_owned())
}

/// What git prints.
pub(crate) fn git(folder: &Path, args: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    command.arg("-C").arg(folder).args(args).stdin(Stdio::null()).env("GIT_TERMINAL_PROMPT", "0");
    // Ctrl-c is ours to answer: git, ended in the middle, would be told as a failure.
    command.process_group(0);
    let output = command.output().context("cannot run git")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("git {} failed: {}", args.join(" "), said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_of_any_repository_has_a_name_the_vault_takes() {
        assert_eq!(secret_name("next.js-app", &[]), "FORGE_NEXT_JS_APP");
    }

    #[test]
    fn no_two_repositories_share_a_secret() {
        let mut known = Vec::new();
        for name in ["my-app", "my_app", "My.App", "my-app-2"] {
            let secret = secret_name(name, &known);
            assert!(
                known.iter().all(|one: &Repository| one.secret.as_ref() != Some(&secret)),
                "{secret}"
            );
            known.push(Repository { secret: Some(secret), ..repository(name) });
        }
        assert_eq!(known[1].secret.as_deref(), Some("FORGE_MY_APP_2"));
        assert_eq!(secret_name("my-app", &known), "FORGE_MY_APP", "its own is no other's");
    }

    fn repository(name: &str) -> Repository {
        Repository {
            name: name.to_owned(),
            url: String::new(),
            base: None,
            secret: None,
            image: String::new(),
            build: None,
            created_at: harvest_proto::Timestamp::from_millis(0),
        }
    }

    #[test]
    fn any_folder_has_a_name_a_repository_may_have() {
        for (folder, name) in [
            ("/a/next.js", "next.js"),
            ("/My Project!", "My-Project"),
            ("/", "folder"),
            ("/x/.git", "git"),
            ("/b.git", "b"),
        ] {
            assert_eq!(folder_name(Path::new(folder)), name);
        }
    }

    #[test]
    fn a_taken_name_gets_a_number_where_that_is_wanted() {
        let known = [repository("app"), repository("app-2")];
        assert_eq!(free_name("app", Naming::Numbered, &known), "app-3");
        assert_eq!(free_name("lib", Naming::Numbered, &known), "lib");
        assert_eq!(free_name("app", Naming::Strict, &known), "app");
    }

    #[test]
    fn the_repository_around_a_folder_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        std::fs::create_dir_all(&inner).unwrap();
        assert_eq!(enclosing(&inner), None);
        std::fs::create_dir(folder.path().join(".git")).unwrap();
        assert_eq!(enclosing(&inner).as_deref(), Some(folder.path()));
        rustix::fs::chown(folder.path().join(".git"), Some(rustix::fs::Uid::from_raw(12345)), None)
            .unwrap();
        assert_eq!(enclosing(&inner), None, "it is somebody else's");
    }

    #[test]
    fn what_git_says_is_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let error = git(folder.path(), &["symbolic-ref", "HEAD"]).unwrap_err();
        assert!(error.to_string().contains("not a git repository"), "{error}");
    }
}
