//! The sample repository: a small Python project with a failing test and a check.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{Context, Result};
use harvest_proto::bridge::Author;

use crate::publish::git;

pub(crate) const NAME: &str = "local/calc";

/// Path, contents and whether the file is executable.
const FILES: [(&str, &str, bool); 5] = [
    (".gitignore", include_str!("sample/gitignore"), false),
    ("README.md", include_str!("sample/README.md"), false),
    ("calc.py", include_str!("sample/calc.py"), false),
    ("test_calc.py", include_str!("sample/test_calc.py"), false),
    (".harvest/check.sh", include_str!("sample/.harvest/check.sh"), true),
];

/// The author of the sample's first commit, and of the demo's on a machine where git knows none.
pub(super) fn author() -> Author {
    Author { name: "Quickstart".to_owned(), email: "quickstart@localhost".to_owned() }
}

/// Writes and commits the sample in `folder`.
pub(crate) fn write(folder: &Path) -> Result<()> {
    for (name, text, executable) in FILES {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(
            &path,
            fs::Permissions::from_mode(if executable { 0o755 } else { 0o644 }),
        )?;
    }
    git(folder, &["init", "-q", "-b", "main"])?;
    git(folder, &["add", "-A"])?;
    let Author { name, email } = author();
    let (name, email) = (format!("user.name={name}"), format!("user.email={email}"));
    let author = ["-c", &*name, "-c", &*email];
    // Independent of the user's git configuration, such as signing.
    let commit = [
        "-c",
        "commit.gpgsign=false",
        "commit",
        "-q",
        "--no-verify",
        "-m",
        "A very small calculator",
    ];
    git(folder, &[&author[..], &commit[..]].concat()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_is_committed_with_executable_check() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        let listed = git(folder.path(), &["ls-tree", "-r", "main"]).unwrap();
        assert!(
            listed
                .lines()
                .any(|line| line.starts_with("100755") && line.ends_with(".harvest/check.sh")),
            "{listed}"
        );
        assert_eq!(listed.lines().count(), FILES.len());
    }
}
