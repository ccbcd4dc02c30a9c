//! Unpacks hostile archives; nothing may appear outside the layer.

use std::{
    collections::BTreeMap,
    ffi::{CString, OsStr},
    fs::{self, File},
    os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            fs::{FileExt, FileTypeExt, MetadataExt, symlink},
        },
    },
};

use harvest_engine::tree;
use proptest::prelude::*;
use rustix::io::Errno;

use super::*;
use crate::archive::tests::{Item, Writer, header, seal};

/// A layer to unpack, on top of another one, beside a folder that must stay unchanged.
struct Case {
    folder: tempfile::TempDir,
    limits: UnpackLimits,
}

impl Case {
    fn new() -> Self {
        let case = Self { folder: tempfile::tempdir().unwrap(), limits: UnpackLimits::default() };
        for name in ["layer", "base", "trash", "outside"] {
            fs::create_dir(case.at(name)).unwrap();
        }
        fs::write(case.at("outside/kept"), "kept").unwrap();
        case
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn unpack(&self, form: ArchiveForm, bytes: &[u8]) -> Result<Unpacked, UnpackError> {
        let (layer, below, trash) = (self.at("layer"), [self.at("base")], self.at("trash"));
        unpack(bytes, form, &Target { layer: &layer, below: &below, trash: &trash }, self.limits)
    }

    fn unpack_root(&self, bytes: &[u8]) -> Result<Unpacked, UnpackError> {
        self.unpack(ArchiveForm::RootFs, bytes)
    }

    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.at("layer").join(path)).unwrap()
    }

    fn outside(&self) -> BTreeMap<PathBuf, (u64, u64, i64, Vec<u8>)> {
        let mut seen = BTreeMap::new();
        for name in ["base", "outside"] {
            let metadata = fs::metadata(self.at(name)).unwrap();
            seen.insert(self.at(name), (0, 0, metadata.ctime(), Vec::new()));
            for entry in fs::read_dir(self.at(name)).unwrap() {
                let path = entry.unwrap().path();
                let metadata = fs::symlink_metadata(&path).unwrap();
                let bytes = fs::read(&path).unwrap_or_default();
                seen.insert(path, (metadata.nlink(), metadata.ino(), metadata.ctime_nsec(), bytes));
            }
        }
        seen
    }
}

#[test]
fn plain_archive_keeps_owners_modes_and_content() {
    let case = Case::new();
    let bytes = Writer::default()
        .add(&Item::folder("./"))
        .add(&Item { owner: 10_001, mode: 0o700, ..Item::folder("./home/") })
        .add(&Item { mode: 0o4755, owner: 65_535, ..Item::file("home/run", b"program") })
        .add(&Item::link(b'2', "home/link", "run"))
        .add(&Item::link(b'1', "home/again", "home/run"))
        .add(&Item { flag: b'6', ..Item::file("home/pipe", b"") })
        .end();
    let done = case.unpack_root(&bytes).unwrap();
    assert_eq!((done.entries, done.bytes), (6, 7));
    let metadata = |path: &str| fs::symlink_metadata(case.at("layer").join(path)).unwrap();
    assert_eq!(
        (metadata("home").uid(), metadata("home").mode() & 0o7777, metadata("home").mtime()),
        (10_001, 0o700, 1_000_000_000)
    );
    assert_eq!(
        (metadata("home/run").uid(), metadata("home/run").mode() & 0o7777),
        (65_535, 0o4755)
    );
    assert_eq!(
        (metadata("home/run").nlink(), metadata("home/run").ino()),
        (2, metadata("home/again").ino())
    );
    assert!(metadata("home/pipe").file_type().is_fifo());
    assert_eq!(fs::read_link(case.at("layer/home/link")).unwrap(), Path::new("run"));
}

#[test]
fn path_with_dot_dot_is_refused() {
    for name in ["../outside/new", "a/../../outside/new", "a/../b", "..", "a/.."] {
        let case = Case::new();
        let refused = case.unpack_root(&Writer::default().add(&Item::file(name, b"x")).end());
        assert!(matches!(refused, Err(UnpackError::Path { .. })), "{name}: {refused:?}");
        assert_eq!(fs::read_dir(case.at("outside")).unwrap().count(), 1);
    }
}

#[test]
fn absolute_path_starts_at_image_root() {
    let case = Case::new();
    case.unpack_root(&Writer::default().add(&Item::file("//etc/./name", b"x")).end()).unwrap();
    assert_eq!(case.text("etc/name"), "x");
}

#[test]
fn symlink_leads_no_later_entry_outside() {
    let case = Case::new();
    let outside = case.at("outside");
    let outside = outside.to_str().unwrap();
    let up = "../".repeat(30) + outside;
    for target in [outside, &up] {
        let bytes = Writer::default()
            .add(&Item::link(b'2', "door", target))
            .add(&Item::file("door/new", b"inside"))
            .add(&Item::link(b'2', "kept", &format!("{target}/kept")))
            .add(&Item::file("kept", b"replaced"))
            .end();
        case.unpack_root(&bytes).unwrap();
        assert_eq!(fs::read_dir(case.at("outside")).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(case.at("outside/kept")).unwrap(), "kept");
        // The path at which a sandbox finds it.
        assert_eq!(case.text(&format!("{}/new", &outside[1..])), "inside");
        assert_eq!(case.text("kept"), "replaced");
    }
}

#[test]
fn symlink_loop_is_refused() {
    let case = Case::new();
    let bytes = Writer::default()
        .add(&Item::link(b'2', "a", "b"))
        .add(&Item::link(b'2', "b", "a"))
        .add(&Item::file("a/x", b""))
        .end();
    assert!(matches!(case.unpack_root(&bytes), Err(UnpackError::File { .. })));
}

#[test]
fn hard_link_to_outside_is_refused() {
    let case = Case::new();
    let absolute = case.at("outside/kept");
    for target in ["../outside/kept", absolute.to_str().unwrap(), "nothing", "/", "x", "folder"] {
        let bytes = Writer::default()
            .add(&Item::folder("folder"))
            .add(&Item::link(b'2', "door", case.at("outside").to_str().unwrap()))
            .add(&Item::link(b'1', "x", target))
            .end();
        let refused = case.unpack_root(&bytes);
        // A hard link to itself is ignored.
        assert!(refused.is_err() || target == "x", "{target}");
        let through = Writer::default()
            .add(&Item::link(b'2', "door", case.at("outside").to_str().unwrap()))
            .add(&Item::link(b'1', "y", "door/kept"))
            .end();
        assert!(matches!(case.unpack_root(&through), Err(UnpackError::Link { .. })));
    }
    assert_eq!(fs::metadata(case.at("outside/kept")).unwrap().nlink(), 1);
}

#[test]
fn devices_outside_dev_are_refused() {
    let case = Case::new();
    let device = |name| Item { flag: b'3', ..Item::file(name, b"") };
    let done = case
        .unpack_root(
            &Writer::default().add(&device("./dev/null")).add(&Item::folder("dev/pts")).end(),
        )
        .unwrap();
    assert_eq!(done.devices, 1);
    assert!(!case.at("layer/dev/null").exists() && case.at("layer/dev/pts").exists());
    for name in ["etc/disk", "device", "dev"] {
        let refused = case.unpack_root(&Writer::default().add(&device(name)).end());
        assert!(matches!(refused, Err(UnpackError::Device { .. })), "{name}");
    }
}

#[test]
fn owner_above_65535_is_refused() {
    for owner in [65_536, 1 << 40] {
        let case = Case::new();
        let refused =
            case.unpack_root(&Writer::default().add(&Item { owner, ..Item::file("a", b"") }).end());
        assert!(matches!(refused, Err(UnpackError::Owner { id, .. }) if id == owner));
    }
}

#[test]
fn later_entry_replaces_earlier_of_same_path() {
    let case = Case::new();
    let bytes = Writer::default()
        .add(&Item::file("a", b"1"))
        .add(&Item::file("a", b"2"))
        .add(&Item::file("b/inner", b"gone"))
        .add(&Item::file("b", b"file now"))
        .add(&Item::file("c", b"file"))
        .add(&Item::folder("c"))
        .add(&Item::file("c/inner", b"3"))
        .end();
    case.unpack_root(&bytes).unwrap();
    assert_eq!([case.text("a"), case.text("b"), case.text("c/inner")], ["2", "file now", "3"]);
}

#[test]
fn names_may_be_any_bytes_but_zero() {
    let case = Case::new();
    let item = Item { name: b"\xff\xfe/\x01", ..Item::file("", b"x") };
    case.unpack_root(&Writer::default().add(&item).end()).unwrap();
    let path = case.at("layer").join(OsStr::from_bytes(b"\xff\xfe/\x01"));
    assert_eq!(fs::read(path).unwrap(), b"x");
    let zero = Writer::default().pax(&[("path", b"a\0b")], &Item::file("x", b"")).end();
    assert!(matches!(
        case.unpack_root(&zero),
        Err(UnpackError::Archive(ArchiveError::Header { .. }))
    ));
}

// 10 GB with 4 bytes at the beginning and 4 at the end.
const SPARSE_BYTES: u64 = 10 << 30;

fn sparse_archives() -> [(&'static str, Vec<u8>); 4] {
    let (size, last) = (SPARSE_BYTES.to_string(), (SPARSE_BYTES - 4).to_string());
    let map = format!("0,4,{last},4");
    let head = format!("2\n0\n4\n{last}\n4\n");
    let mut content = head.into_bytes();
    content.resize(512, 0);
    content.extend_from_slice(b"headtail");
    let item = Item::file("sparse", b"headtail");
    let mut old = header(&Item { flag: b'S', ..item.clone() }, 8);
    for (at, value) in
        [(386, 0u64), (398, 4), (410, SPARSE_BYTES - 4), (422, 4), (483, SPARSE_BYTES)]
    {
        old[at..at + 12].copy_from_slice(&[&[0x80, 0, 0, 0][..], &value.to_be_bytes()].concat());
    }
    old[257..265].copy_from_slice(b"ustar  \0");
    seal(&mut old);
    let mut by_header = Writer(old.to_vec());
    by_header.content(b"headtail");
    let zero: [(&str, &[u8]); 6] = [
        ("GNU.sparse.size", size.as_bytes()),
        ("GNU.sparse.numblocks", b"2"),
        ("GNU.sparse.offset", b"0"),
        ("GNU.sparse.numbytes", b"4"),
        ("GNU.sparse.offset", last.as_bytes()),
        ("GNU.sparse.numbytes", b"4"),
    ];
    let one: [(&str, &[u8]); 3] = [
        ("GNU.sparse.size", size.as_bytes()),
        ("GNU.sparse.name", b"sparse"),
        ("GNU.sparse.map", map.as_bytes()),
    ];
    let two: [(&str, &[u8]); 4] = [
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"sparse"),
        ("GNU.sparse.realsize", size.as_bytes()),
    ];
    let other = Item { name: b"GNUSparseFile.0/sparse", ..item.clone() };
    [
        ("old", by_header.end()),
        ("0.0", Writer::default().pax(&zero, &item).end()),
        ("0.1", Writer::default().pax(&one, &other).end()),
        ("1.0", Writer::default().pax(&two, &Item { data: &content, ..other }).end()),
    ]
}

#[test]
fn sparse_files_stay_sparse_in_all_formats() {
    for (form, bytes) in sparse_archives() {
        let mut case = Case::new();
        case.limits.bytes = 1 << 20;
        let done = case.unpack_root(&bytes).unwrap_or_else(|error| panic!("{form}: {error:?}"));
        assert_eq!(done.bytes, 8, "{form}");
        let metadata = fs::metadata(case.at("layer/sparse")).unwrap();
        assert_eq!(metadata.len(), SPARSE_BYTES, "{form}");
        assert!(metadata.blocks() * 512 <= 1 << 16, "{form}");
        let file = File::open(case.at("layer/sparse")).unwrap();
        let mut tail = [0; 8];
        file.read_exact_at(&mut tail, SPARSE_BYTES - 8).unwrap();
        assert_eq!(&tail, b"\0\0\0\0tail", "{form}");
    }
}

#[test]
fn blocks_of_zeros_become_holes() {
    let case = Case::new();
    let mut data = vec![0; 4 << 20];
    data[1 << 20] = 1;
    case.unpack_root(&Writer::default().add(&Item::file("zeros", &data)).end()).unwrap();
    assert_eq!(fs::read(case.at("layer/zeros")).unwrap(), data);
    assert!(fs::metadata(case.at("layer/zeros")).unwrap().blocks() * 512 <= 1 << 17);
}

#[test]
fn archive_beyond_limits_is_refused() {
    let mut case = Case::new();
    case.limits = UnpackLimits { bytes: 10_000, entries: 10 };
    let large = Writer::default().add(&Item::file("large", &[1; 12_049])).end();
    assert!(matches!(
        case.unpack_root(&large),
        Err(UnpackError::Limit { limit: 10_000, unit: "bytes" })
    ));
    // Content of a volume label, and bytes after the archive's end.
    let label = Writer::default().add(&Item { flag: b'V', ..Item::file("label", &[1; 20_000]) });
    assert!(matches!(
        case.unpack_root(&label.add(&Item::folder("x")).end()),
        Err(UnpackError::Limit { .. })
    ));
    let behind = [Writer::default().end(), vec![0; 20_000]].concat();
    assert!(matches!(case.unpack_root(&behind), Err(UnpackError::Limit { .. })));
    let many = (0..11).fold(Writer::default(), |writer, _| writer.add(&Item::folder("a")));
    assert!(matches!(
        case.unpack_root(&many.end()),
        Err(UnpackError::Limit { limit: 10, unit: "entries" })
    ));
}

#[test]
fn only_file_capabilities_survive_of_extended_attributes() {
    let case = Case::new();
    let capability = [[1, 0, 0, 2, 0, 4, 0, 0].as_slice(), &[0; 12]].concat();
    let records: [(&str, &[u8]); 4] = [
        ("SCHILY.xattr.security.capability", &capability),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ("SCHILY.xattr.user.overlay.redirect", b"/outside"),
        ("SCHILY.xattr.user.note", b"text"),
    ];
    case.unpack_root(&Writer::default().pax(&records, &Item::file("program", b"x")).end()).unwrap();
    let mut names = vec![0; 1000];
    let file = File::open(case.at("layer/program")).unwrap();
    let length = rustix::fs::flistxattr(&file, &mut names[..]).unwrap();
    let names: Vec<&[u8]> = names[..length]
        .split(|byte| *byte == 0)
        .filter(|name| name.starts_with(b"security.cap") || !name.starts_with(b"security."))
        .filter(|name| !name.is_empty())
        .collect();
    assert_eq!(names, [b"security.capability"]);
}

#[test]
fn layer_markers_hide_only_the_layers_below() {
    let case = Case::new();
    let bytes = Writer::default()
        .add(&Item::file("a/.wh.gone", b""))
        .add(&Item::file("b/.wh..wh..opq", b""))
        .add(&Item::file("b/new", b"1"))
        // A folder before its marker, and one after it.
        .add(&Item::file("c/new", b"2"))
        .add(&Item::file(".wh.c", b""))
        .add(&Item::file(".wh.d", b""))
        .add(&Item::file("d/new", b"3"))
        .add(&Item::file(".wh.e", b""))
        .add(&Item::file("e", b"4"))
        .add(&Item::file(".wh..wh.plnk", b""))
        .end();
    case.unpack(ArchiveForm::Layer, &bytes).unwrap();
    let layer = tree::open_root(&case.at("layer")).unwrap();
    let stat = |path: &str| {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let folder = tree::open_folder(layer.as_fd(), Path::new(folder)).unwrap();
        tree::stat(folder.as_fd(), &CString::new(name).unwrap())
    };
    assert!(tree::is_whiteout(&stat("a/gone").unwrap()));
    for folder in ["b", "c", "d"] {
        let opened = tree::open_folder(layer.as_fd(), Path::new(folder)).unwrap();
        assert!(tree::is_opaque(opened.as_fd()).unwrap(), "{folder}");
        assert!(stat(&format!("{folder}/new")).is_ok());
    }
    assert_eq!(case.text("e"), "4");
    assert_eq!(stat(".wh..wh.plnk").unwrap_err(), Errno::NOENT);
    for name in [".wh.", ".wh..", ".wh..."] {
        let refused =
            case.unpack(ArchiveForm::Layer, &Writer::default().add(&Item::file(name, b"")).end());
        assert!(matches!(refused, Err(UnpackError::Path { .. })), "{name}");
    }
    // A root file system has no markers.
    case.unpack_root(&Writer::default().add(&Item::file(".wh.name", b"5")).end()).unwrap();
    assert_eq!(case.text(".wh.name"), "5");
}

#[test]
fn symlinks_of_layers_below_are_followed() {
    let case = Case::new();
    fs::create_dir_all(case.at("base/usr/lib")).unwrap();
    fs::set_permissions(
        case.at("base/usr/lib"),
        std::os::unix::fs::PermissionsExt::from_mode(0o711),
    )
    .unwrap();
    symlink("usr/lib", case.at("base/lib")).unwrap();
    fs::write(case.at("base/usr/lib/old"), "old").unwrap();
    let bytes = Writer::default()
        .add(&Item::file("lib/new", b"new"))
        .add(&Item::link(b'1', "usr/lib/again", "lib/old"))
        .end();
    case.unpack(ArchiveForm::Layer, &bytes).unwrap();
    assert_eq!([case.text("usr/lib/new"), case.text("usr/lib/again")], ["new", "old"]);
    assert!(!case.at("layer/lib").exists());
    assert_eq!(fs::metadata(case.at("layer/usr/lib")).unwrap().mode() & 0o777, 0o711);
    assert_eq!(fs::metadata(case.at("base/usr/lib/old")).unwrap().nlink(), 1);
}

fn any_path() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => "[abc]", 1 => Just("..".to_owned()), 1 => Just(".".to_owned()), 1 => Just("dev".to_owned()),
        1 => "\\.wh\\.[abc]", 1 => Just(".wh..wh..opq".to_owned()), 1 => Just(".wh...".to_owned()),
    ];
    (any::<bool>(), prop::collection::vec(part, 0..5)).prop_map(|(absolute, parts)| {
        format!("{}{}", if absolute { "/" } else { "" }, parts.join("/"))
    })
}

fn any_item() -> impl Strategy<Value = (u8, String, String)> {
    let flag = prop_oneof![Just(b'0'), Just(b'1'), Just(b'2'), Just(b'3'), Just(b'5'), Just(b'6')];
    let target = prop_oneof![
        3 => any_path(), 1 => Just("OUTSIDE".to_owned()), 1 => Just("OUTSIDE/kept".to_owned()),
        1 => Just("../outside".to_owned()), 1 => Just("../../outside/kept".to_owned()),
    ];
    (flag, any_path(), target)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn no_archive_writes_outside_its_layer(
        items in prop::collection::vec(any_item(), 1..12),
        layered: bool,
    ) {
        let case = Case::new();
        symlink(case.at("outside"), case.at("base/a")).unwrap();
        fs::create_dir(case.at("base/b")).unwrap();
        let before = case.outside();
        let outside = case.at("outside").to_str().unwrap().to_owned();
        let form = if layered { ArchiveForm::Layer } else { ArchiveForm::RootFs };
        // One archive per entry, all into the same layer: a refused entry does not end the run.
        for (flag, path, target) in &items {
            let target = target.replace("OUTSIDE", &outside);
            let item = Item { flag: *flag, mode: 0o777, ..Item::link(*flag, path, &target) };
            let data = if *flag == b'0' { &b"changed"[..] } else { b"" };
            let _ = case.unpack(form, &Writer::default().add(&Item { data, ..item }).end());
        }
        prop_assert_eq!(case.outside(), before);
        let top = fs::read_dir(case.folder.path()).unwrap();
        let top: Vec<_> = top.map(|entry| entry.unwrap().file_name()).collect();
        prop_assert_eq!(top.len(), 4, "{:?}", top);
    }
}
