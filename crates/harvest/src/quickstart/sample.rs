//! The sample repository: a small Python project whose one test fails, with a declared check.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{Context, Result};

use crate::publish::git;

/// What it is called.
pub(crate) const NAME: &str = "calc";

/// Its files; the last part says whether it is a program.
const FILES: [(&str, &str, bool); 5] = [
    (".gitignore", include_str!("sample/gitignore"), false),
    ("README.md", include_str!("sample/README.md"), false),
    ("calc.py", include_str!("sample/calc.py"), false),
    ("test_calc.py", include_str!("sample/test_calc.py"), false),
    (".harvest/check.sh", include_str!("sample/.harvest/check.sh"), true),
];

/// Writes and commits the sample in `folder`.
pub(crate) fn write(folder: &Path) -> Result<()> {
    for (name, text, program) in FILES {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(
            &path,
            fs::Permissions::from_mode(if program { 0o755 } else { 0o644 }),
        )?;
    }
    git(folder, &["init", "-q", "-b", "main"])?;
    git(folder, &["add", "-A"])?;
    let who = ["-c", "user.name=Quickstart", "-c", "user.email=quickstart@localhost"];
    // Whatever the person's own configuration asks for, signing included.
    let plain = [
        "-c",
        "commit.gpgsign=false",
        "commit",
        "-q",
        "--no-verify",
        "-m",
        "A very small calculator",
    ];
    git(folder, &[&who[..], &plain[..]].concat()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_is_committed_on_main_with_its_check() {
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
