//! Checks out the commit that a check is about, in a sandbox that was booted on the base.

use std::{fs, io, path::Path};

use harvest_proto::{api::RepositoryConfig, bridge::Reply};

use super::Git;
use crate::{
    files,
    git::requests::FETCH_TIMEOUT,
    install::{CONFIG_FILE, parse_config},
    users::User,
};

/// Lists files below `.harvest` that differ between two commits, then their number. Git quotes
/// unusual names, so that each is one line of ASCII.
const CHANGED: &str = r#"
changed() { git -c core.quotePath=true diff --name-only --no-renames --no-ext-diff "$@" -- .harvest; }
changed "$@" > /dev/null || exit 1
changed "$@" | head -n 20 | cut -c 1-200
changed "$@" | wc -l
"#;

// Git's hash of the empty tree.
const EMPTY_TREE: &str = "4b825dc642cb6eb9a060e54bf8d69288fbee4904";

impl Git<'_> {
    /// Checks the commit out in place of the base, and tells what the base declares and what the
    /// commit changes of that.
    pub(super) async fn check_out_commit(
        &self,
        folder: &str,
        branch: Option<&str>,
        commit: &str,
    ) -> Result<Reply, String> {
        let base = self.head(folder).await;
        // A broken file declares nothing: builds and sessions have warned of it.
        let config = read_config(Path::new(folder), self.user).unwrap_or_default();
        let declared = config.and_then(|config| config.check).filter(|_| base.is_some());
        let source = branch.map_or(commit.to_owned(), |branch| format!("refs/heads/{branch}"));
        let source = format!("+{source}:refs/harvest/pushed");
        self.run_for(FETCH_TIMEOUT, folder, &["fetch", "--quiet", "origin", &source]).await?;
        // The session may have started from an older commit than the newest build: checks that look
        // at what the branch changed need where it left the base.
        let parted = match &base {
            Some(base) => self.merge_base(folder, base, commit).await?,
            None => None,
        };
        let check_out = ["checkout", "--quiet", "--force", "--detach", commit];
        self.run(folder, &check_out).await?;
        let after = self.head(folder).await;
        if after.as_deref() != Some(commit) {
            return Err(format!("the checkout is at {after:?} instead of {commit}"));
        }
        self.move_submodules(folder).await?;
        let before = parted.as_deref().or(base.as_deref()).unwrap_or(EMPTY_TREE);
        let (changed, changed_count) = self.changed_files(folder, before, commit).await?;
        Ok(Reply::CheckedOut { base, declared, changed, changed_count })
    }

    /// The commit at which two histories parted; the clone may not reach back to it.
    async fn merge_base(
        &self,
        folder: &str,
        base: &str,
        commit: &str,
    ) -> Result<Option<String>, String> {
        let arguments = ["merge-base", base, commit];
        if self.run(folder, &arguments).await.is_err() {
            self.complete_history(folder).await?;
        }
        Ok(self.last_line(folder, &arguments).await)
    }

    async fn changed_files(
        &self,
        folder: &str,
        before: &str,
        after: &str,
    ) -> Result<(Vec<String>, u64), String> {
        let argv = ["sh", "-c", CHANGED, "sh", before, after].map(str::to_owned).into();
        parse_changed(&self.capture(argv, folder).await?)
            .ok_or_else(|| "cannot compare the folder .harvest".to_owned())
    }
}

/// The names and the number after them.
fn parse_changed(printed: &str) -> Option<(Vec<String>, u64)> {
    let mut lines: Vec<&str> = printed.lines().collect();
    let count = lines.pop()?.trim().parse().ok()?;
    // Warnings of git come on lines of their own.
    let names = lines.into_iter().map(|line| line.trim_matches('"'));
    let names = names.filter(|line| line.starts_with(".harvest"));
    Some((names.map(str::to_owned).collect(), count))
}

/// What a checkout's `.harvest/config.toml` says; `None` without one.
pub(crate) fn read_config(folder: &Path, user: &User) -> Result<Option<RepositoryConfig>, String> {
    let path = folder.join(CONFIG_FILE);
    match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Ok(about) if !about.is_file() => return Err("it is not a regular file".to_owned()),
        _ => {}
    }
    let text = files::read_small(&path, user).map_err(|error| error.to_string())?;
    text.map(|text| parse_config(&text)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_files_and_their_number_are_parsed() {
        let printed = "warning: x\n.harvest/check.sh\n\".harvest/a\\nb\"\n    31\n";
        let names = vec![".harvest/check.sh".to_owned(), ".harvest/a\\nb".to_owned()];
        assert_eq!(parse_changed(printed), Some((names, 31)));
        assert_eq!(parse_changed("0\n"), Some((Vec::new(), 0)));
        assert_eq!(parse_changed("fatal: bad\n"), None);
    }
}
