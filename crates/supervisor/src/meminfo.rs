//! Keeps the sandbox's `/proc/meminfo` current: the kernel's would show the host.

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
};

use harvest_proto::{launch::Descriptor, meminfo::MemoryUsage};

use crate::{launch::InheritedFds, log};

// `memory.stat` has 2 to 4 KB.
const BUFFER_BYTES: usize = 8 * 1024;

pub(crate) struct Meminfo {
    file: File,
    used: File,
    stat: File,
    total: u64,
}

impl Meminfo {
    /// Nothing where the sandbox sees the host's memory.
    pub(crate) fn new(inherited: &mut InheritedFds) -> Option<Self> {
        let [file, used, stat] =
            [Descriptor::Meminfo, Descriptor::MemoryUsed, Descriptor::MemoryStat]
                .map(|kind| inherited.take(kind));
        Self::of(file?, used?, stat?)
    }

    fn of(file: OwnedFd, used: OwnedFd, stat: OwnedFd) -> Option<Self> {
        let [file, used, stat] = [file, used, stat].map(File::from);
        let text = read(&file).ok()?;
        let total = text.strip_prefix("MemTotal:")?.split_whitespace().next()?;
        let total = total.parse::<u64>().ok()?.checked_mul(1024)?;
        Some(Self { file, used, stat, total })
    }

    /// Writes the current usage, in place and of the same length: readers have the file open.
    pub(crate) fn refresh(&self) {
        let refresh = || -> io::Result<()> {
            let usage = MemoryUsage::parse(self.total, &read(&self.used)?, &read(&self.stat)?);
            self.file.write_all_at(usage.meminfo().as_bytes(), 0)
        };
        if let Err(error) = refresh() {
            log::line(format_args!("cannot refresh /proc/meminfo: {error}"));
        }
    }
}

fn read(file: &File) -> io::Result<String> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let count = file.read_at(&mut buffer, 0)?;
    buffer.truncate(count);
    String::from_utf8(buffer).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn refresh_replaces_the_whole_text() {
        let before = MemoryUsage { total: 1 << 30, ..MemoryUsage::default() };
        let (shown, used) = (file(&before.meminfo()), file("104857600\n"));
        let shared = shown.try_clone().unwrap();
        let stat = file("anon 94371840\nfile 0\n");
        let meminfo = Meminfo::of(shown.into(), used.into(), stat.into()).unwrap();
        meminfo.refresh();
        let expected = MemoryUsage { used: 100 << 20, anonymous: 90 << 20, ..before }.meminfo();
        assert_eq!(read(&shared).unwrap(), expected);
    }
}
