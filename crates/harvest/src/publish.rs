//! Puts a folder's repository on the local forge and registers it: for work without an account anywhere.
//! The folder itself is only read.

use std::{
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use harvest_github::{Forge, ForgeError};
use harvest_proto::{
    Secret,
    api::{AddRepository, Repository},
};

use crate::{client::Client, printer::Advice, wire};

/// Copies the branch that is checked out in `folder` to the forge of this server and registers it there.
pub(crate) async fn publish(
    client: &Client,
    forge: &Forge,
    folder: &Path,
    mut add: AddRepository,
) -> Result<Repository> {
    let name = match add.name.take() {
        Some(name) => name,
        None => folder_name(folder)?,
    };
    if client.repositories().await?.iter().any(|known| known.name == name) {
        bail!(Advice::new(format!("there is a repository `{name}` already"), "choose another with --name"));
    }
    let branch = git(folder, &["symbolic-ref", "--short", "HEAD"]).map_err(|error| {
        let message = format!("{} is not a git repository with a branch checked out", folder.display());
        error.context(Advice::new(message, "`git init` and a first commit make it one"))
    })?;
    let token = Secret::new(wire::random_token());
    match forge.create(&name, &token).await {
        // An earlier try got as far as this.
        Err(ForgeError::Exists { .. }) => forge.set_token(&name, &token)?,
        other => drop(other.context("cannot make a repository on the local forge")?),
    }
    let bare = forge.repository(&name)?;
    let target = bare.to_str().context("the forge's folder is not UTF-8")?;
    let head = format!("refs/heads/{branch}");
    // The hooks of somebody's folder are not ours to run.
    git(
        folder,
        &["-c", "core.hooksPath=/dev/null", "push", "-q", "--no-verify", target, &format!("HEAD:{head}")],
    )?;
    git(&bare, &["symbolic-ref", "HEAD", &head])?;
    let secret = secret_name(&name);
    client.secret_set(&secret, &token).await?;
    let request = AddRepository {
        url: forge.url(&name),
        name: Some(name),
        base: add.base.or(Some(branch)),
        secret: Some(secret),
        image: add.image,
    };
    client.repository_add(&request).await.context("cannot register the repository")
}

fn folder_name(folder: &Path) -> Result<String> {
    let folder = folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))?;
    let name = folder.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    name.context(Advice::new("the folder has no name", "choose one with --name"))
}

/// Secrets are named in capitals.
fn secret_name(repository: &str) -> String {
    let letter =
        |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_uppercase() } else { '_' };
    format!("FORGE_{}", repository.chars().map(letter).collect::<String>())
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
        assert_eq!(secret_name("next.js-app"), "FORGE_NEXT_JS_APP");
    }

    #[test]
    fn what_git_says_is_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let error = git(folder.path(), &["symbolic-ref", "HEAD"]).unwrap_err();
        assert!(error.to_string().contains("not a git repository"), "{error}");
    }
}
