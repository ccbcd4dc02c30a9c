//! The steps that put a sandbox's files together: layers, `/proc`, `/dev`, what is bound and attached, the new root.

use std::{io, os::fd::AsFd};

use super::{
    Birth, Work,
    mounts::{Scratch, Tree},
    out_of_order,
    users::act_as,
};
use crate::{
    error::{Doing, StepError},
    plan::Step,
};

impl Work {
    pub(super) fn disk_step(&mut self, step: &Step, birth: &Birth<'_>) -> Result<(), StepError> {
        match step {
            Step::Scratch => {
                self.scratch = Some(Scratch::make()?);
                // What is made ahead belongs to root inside.
                act_as(birth.first_id)
            }
            Step::Overlay { lowers } => {
                // An overlay acts for its maker: with ids the layers do not know it could write nothing.
                act_as(birth.first_id)?;
                let root =
                    self.scratch()?.overlay(lowers).doing(|| "mount the overlay".to_owned())?;
                self.tree = Some(Tree { root });
                Ok(())
            }
            Step::Furnish => {
                let furnish = self.scratch()?.furnish(self.tree()?);
                furnish.doing(|| "put /proc, /dev and /sys into the root".to_owned())
            }
            Step::Root => {
                let tree = self.tree.take().ok_or_else(out_of_order)?;
                self.scratch = None;
                tree.enter().doing(|| "enter the new root".to_owned())
            }
            Step::Layer { .. } | Step::Writable | Step::Bind { .. } | Step::Volume { .. } => {
                self.attach(step, birth)
            }
            _ => self.provide(step, birth),
        }
    }

    /// What the host has, handed over.
    fn attach(&self, step: &Step, birth: &Birth<'_>) -> Result<(), StepError> {
        let handed = |number: usize| self.handed.get(number).ok_or(io::ErrorKind::NotFound);
        let ids = (birth.first_id != 0).then_some(birth.users.as_fd());
        match step {
            Step::Layer { from, name } => handed(from.number)
                .map_err(io::Error::from)
                .and_then(|tree| {
                    self.scratch.as_ref().ok_or(io::ErrorKind::Other)?.layer(tree, name, ids)
                })
                .doing(|| format!("attach the layer {}", from.path.display())),
            Step::Writable => {
                let folder = &self.calling()?.writable;
                self.scratch()?
                    .writable(folder, ids)
                    .doing(|| format!("attach {}", folder.display()))
            }
            Step::Bind { from, inside } => handed(from.number)
                .map_err(io::Error::from)
                .and_then(|tree| self.tree.as_ref().ok_or(io::ErrorKind::Other)?.bind(tree, inside))
                .doing(|| format!("bind {} to {}", from.path.display(), inside.display())),
            Step::Volume { from, inside, read_only } => handed(from.number)
                .map_err(io::Error::from)
                .and_then(|mount| {
                    let tree = self.tree.as_ref().ok_or(io::ErrorKind::Other)?;
                    tree.volume(mount, inside, *read_only, ids)
                })
                .doing(|| {
                    format!("attach the volume {} to {}", from.path.display(), inside.display())
                }),
            _ => Err(out_of_order()),
        }
    }

    /// What is made for the sandbox.
    fn provide(&mut self, step: &Step, birth: &Birth<'_>) -> Result<(), StepError> {
        match step {
            Step::Proc => self.ahead()?.proc().doing(|| "mount /proc".to_owned()),
            Step::Dev { nodes } => {
                let nodes =
                    nodes.iter().map(|(name, (major, minor))| (name.as_str(), *major, *minor));
                self.ahead()?.dev(nodes, birth.first_id).doing(|| "make /dev".to_owned())
            }
            Step::Shm { bytes } => self.tree()?.shm(*bytes).doing(|| "mount /dev/shm".to_owned()),
            Step::Empty { inside } => {
                self.ahead()?.empty(inside).doing(|| format!("cover {}", inside.display()))
            }
            Step::Mask { paths } => self
                .ahead()?
                .mask(paths, self.scratch()?)
                .doing(|| "mask parts of /proc".to_owned()),
            Step::ReadOnly { paths } => {
                self.ahead()?.read_only(paths).doing(|| "make parts of /proc read-only".to_owned())
            }
            Step::File { inside, text } => {
                self.files += 1;
                let file = self.scratch()?.file(self.files, text);
                file.and_then(|file| {
                    self.tree.as_ref().ok_or(io::ErrorKind::Other)?.on_file(&file, inside)
                })
                .doing(|| format!("provide {}", inside.display()))
            }
            _ => Err(out_of_order()),
        }
    }

    pub(super) fn scratch(&self) -> Result<&Scratch, StepError> {
        self.scratch.as_ref().ok_or_else(out_of_order)
    }

    fn ahead(&self) -> Result<Tree, StepError> {
        self.scratch()?.ahead().doing(|| "find what is made ahead".to_owned())
    }

    fn tree(&self) -> Result<&Tree, StepError> {
        self.tree.as_ref().ok_or_else(out_of_order)
    }
}
