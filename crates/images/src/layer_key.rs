//! Cache keys: equal for the same step on the same parent, different for everything else.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};

use harvest_engine::{LayerId, tree};
use ring::digest::{Context, SHA256};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use serde::Serialize;

use crate::{ImageError, stream::hex};

// Increment when the same recipe must produce another image, such as when a step's script changes.
const FORMAT_VERSION: u32 = 2;

/// The key of `what` on top of the key `parent`. `content` is a digest of files that belong to it.
pub(crate) fn key(parent: &str, what: &impl Serialize, content: &str) -> String {
    let mut hash = Context::new(&SHA256);
    let what = serde_json::to_vec(what).expect("recipes hold only maps with text keys");
    // Each part is preceded by its length, so that no two lists of parts hash the same bytes.
    for part in [&FORMAT_VERSION.to_le_bytes()[..], parent.as_bytes(), &what, content.as_bytes()] {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(hash.finish().as_ref())
}

/// The layer of a key.
pub(crate) fn layer_of_key(key: &str) -> LayerId {
    key.parse().expect("hexadecimal text is a valid layer id")
}

/// A digest of a file or folder: names, modes, owners and content, which are what a copy keeps.
pub(crate) fn content_key(path: &Path) -> Result<String, ImageError> {
    let mut hash = Context::new(&SHA256);
    let meta = fs::symlink_metadata(path).map_err(|e| ImageError::file("read", path, e))?;
    if meta.is_dir() {
        tree::visit(path, &mut |name, folder, stat| {
            hash_one(&mut hash, name, folder, stat)
                .map_err(|e| ImageError::file("read", path.join(name), e))
        })?;
    } else {
        let folder = tree::open_root(path.parent().unwrap_or(Path::new(".")))?;
        let name = Path::new(path.file_name().unwrap_or_default());
        let stat = rustix::fs::lstat(path).map_err(|e| ImageError::file("read", path, e))?;
        hash_one(&mut hash, name, folder.as_fd(), &stat)
            .map_err(|e| ImageError::file("read", path, e))?;
    }
    Ok(hex(hash.finish().as_ref()))
}

fn hash_one(
    hash: &mut Context,
    path: &Path,
    folder: BorrowedFd<'_>,
    stat: &Stat,
) -> io::Result<()> {
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
    use crate::recipe::RecipeStep;

    #[test]
    fn key_is_stable_and_depends_on_every_part() {
        let run = |text: &str| RecipeStep::Run(text.to_owned());
        let one = key("parent", &run("a"), "");
        assert_eq!(one, key("parent", &run("a"), ""));
        for other in [
            key("parens", &run("a"), ""),
            key("parent", &run("b"), ""),
            key("parent", &run("a"), "c"),
            key("parent", &RecipeStep::User("a".to_owned()), ""),
        ] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn content_key_covers_content_names_modes_and_links() {
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
