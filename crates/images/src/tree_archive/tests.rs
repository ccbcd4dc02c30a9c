//! Packs and unpacks trees with everything a layer can hold, and hostile archives.

use std::{
    fs,
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink},
};

use flate2::{Compression, write::GzEncoder};
use rustix::fs::{FileType, XattrFlags};

use super::*;
use crate::archive::tests::{Item, Writer as RawWriter};

/// A folder with a tree to pack, one to unpack into, a trash, and one that must stay empty.
struct Case(tempfile::TempDir);

impl Case {
    fn new() -> Self {
        let case = Self(tempfile::tempdir().unwrap());
        for name in ["tree", "into", "trash", "outside"] {
            fs::create_dir(case.at(name)).unwrap();
        }
        case
    }

    fn at(&self, path: &str) -> std::path::PathBuf {
        self.0.path().join(path)
    }

    fn packed(&self) -> (Vec<u8>, u64) {
        let gzip = GzEncoder::new(Vec::new(), Compression::fast());
        let mut archive = TreeArchive::new(gzip);
        archive.add_bytes("first", b"about").unwrap();
        archive.add_tree("layers/one", &self.at("tree")).unwrap();
        let left_out = archive.left_out();
        (archive.finish().unwrap().finish().unwrap(), left_out)
    }

    fn unpack(&self, bytes: &[u8]) -> Result<(), UnpackError> {
        unpack_trees(bytes, &self.at("into"), &self.at("trash"))
    }
}

#[test]
fn tree_is_the_same_after_unpacking() {
    let case = Case::new();
    let tree = case.at("tree");
    fs::create_dir_all(tree.join("a/opaque")).unwrap();
    fs::write(tree.join("a/file"), "text").unwrap();
    fs::write(tree.join("a/large"), vec![7; 3 << 20]).unwrap();
    fs::hard_link(tree.join("a/file"), tree.join("b")).unwrap();
    symlink("/etc/passwd", tree.join("a/link")).unwrap();
    let sparse = File::create(tree.join("sparse")).unwrap();
    sparse.write_all_at(b"end", 1 << 33).unwrap();
    let folder = tree::open_root(&tree.join("a")).unwrap();
    tree::make_whiteout(folder.as_fd(), c"gone").unwrap();
    tree::make_opaque(tree::open_root(&tree.join("a/opaque")).unwrap().as_fd()).unwrap();
    let file = File::open(tree.join("a/file")).unwrap();
    rustix::fs::fsetxattr(&file, c"user.mine", b"v\n=", XattrFlags::empty()).unwrap();
    let capability = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    std::os::unix::fs::chown(tree.join("a/file"), Some(10_001), Some(7)).unwrap();
    fs::set_permissions(tree.join("a/file"), fs::Permissions::from_mode(0o4750)).unwrap();
    rustix::fs::fsetxattr(&file, c"security.capability", &capability, XattrFlags::empty()).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();

    let (packed, left_out) = case.packed();
    assert!(packed.len() < 100_000, "a hole of 8 GB is not packed: {}", packed.len());
    assert_eq!(left_out, 1, "the socket");
    assert_eq!(check_archive(&*packed, "first").unwrap().as_deref(), Some(&b"about"[..]));
    assert_eq!(check_archive(&*packed, "other").unwrap(), None);
    case.unpack(&packed).unwrap();
    let into = case.at("into/layers/one");
    for path in ["a", "a/file", "a/large", "a/link", "a/opaque", "b", "sparse"] {
        let metadata = |root: &Path| {
            let stat = root.join(path).symlink_metadata().unwrap();
            let times = (stat.mtime(), stat.mtime_nsec());
            (stat.mode(), stat.uid(), stat.gid(), times, stat.nlink(), stat.len() % 4096)
        };
        assert_eq!(metadata(&into), metadata(&tree), "{path}");
    }
    assert_eq!(fs::read(into.join("a/large")).unwrap(), vec![7; 3 << 20]);
    assert_eq!(fs::read_link(into.join("a/link")).unwrap(), Path::new("/etc/passwd"));
    assert!(fs::metadata(into.join("sparse")).unwrap().blocks() < 100);
    let gone = fs::symlink_metadata(into.join("a/gone")).unwrap();
    assert!(gone.file_type().is_char_device() && gone.rdev() == 0);
    assert!(tree::is_opaque(tree::open_root(&into.join("a/opaque")).unwrap().as_fd()).unwrap());
    let file = File::open(into.join("a/file")).unwrap();
    for (name, value) in [(c"user.mine", &b"v\n="[..]), (c"security.capability", &capability)] {
        let mut buffer = [0; 64];
        let length = rustix::fs::fgetxattr(&file, name, &mut buffer[..]).unwrap();
        assert_eq!(&buffer[..length], value);
    }
}

#[test]
fn path_too_long_for_an_archive_is_counted() {
    let case = Case::new();
    let mut folder = tree::open_root(&case.at("tree")).unwrap();
    let name = "n".repeat(200);
    for _ in 0..25 {
        rustix::fs::mkdirat(&folder, &*name, Mode::RWXU).unwrap();
        folder = tree::open_folder(folder.as_fd(), Path::new(&name)).unwrap();
    }
    let (packed, left_out) = case.packed();
    assert_eq!(left_out, 5);
    case.unpack(&packed).unwrap();
}

#[test]
fn hostile_archive_writes_nothing_outside() {
    fn outside(case: &Case) -> String {
        case.at("outside").display().to_string()
    }
    let archives: [fn(&Case) -> Vec<u8>; 4] = [
        |_| RawWriter::default().add(&Item::file("../outside/x", b"x")).end(),
        |_| RawWriter::default().add(&Item::file("a/../../outside/x", b"x")).end(),
        |case| {
            let link = outside(case);
            let writer = RawWriter::default().add(&Item::link(b'2', "link", &link));
            writer.add(&Item::file("link/x", b"x")).end()
        },
        |case| {
            let target = format!("{}/x", outside(case));
            RawWriter::default().add(&Item::link(b'1', "hard", &target)).end()
        },
    ];
    for archive in archives {
        let case = Case::new();
        let _ = case.unpack(&archive(&case));
        assert_eq!(fs::read_dir(case.at("outside")).unwrap().count(), 0);
    }
}

#[test]
fn device_in_an_archive_becomes_a_whiteout() {
    let case = Case::new();
    let device = Item { flag: b'4', ..Item::file("disk", b"") };
    case.unpack(&RawWriter::default().add(&device).end()).unwrap();
    let made = fs::symlink_metadata(case.at("into/disk")).unwrap();
    assert_eq!((FileType::from_raw_mode(made.mode()), made.rdev()), (FileType::CharacterDevice, 0));
}

#[test]
fn damaged_or_truncated_archive_is_refused() {
    let case = Case::new();
    // Without repetitions: a changed distance within a run would yield the same bytes.
    let random = |state: &u32| Some(state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    let states = std::iter::successors(Some(1), random).take(100_000);
    let content: Vec<u8> = states.map(|state| state.to_be_bytes()[0]).collect();
    fs::write(case.at("tree/file"), content).unwrap();
    let (packed, _) = case.packed();
    for at in [packed.len() / 2, packed.len() - 6] {
        let mut damaged = packed.clone();
        damaged[at] ^= 1;
        assert!(check_archive(&*damaged, "first").is_err(), "byte {at}");
        assert!(check_archive(&packed[..at], "first").is_err(), "cut at {at}");
    }
}
