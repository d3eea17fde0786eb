"""Names on disk, and the order in which they appear: what makes a save all or nothing.

DIR/.TAG.saving/      a save under way, or what a crash left of one
DIR/TAG/              a complete checkpoint: it gets this name, in one step, when all of it is on the disk
DIR/.TAG.replaced/    the former checkpoint of that tag, for the moment in which the new one takes its place
DIR/.TAG.removing/    one that retention takes away
DIR/latest            the tag that a load without one takes; written last
"""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from shardledger.checkpoint.files import Files
from shardledger.checkpoint.manifest import MANIFEST_NAME, Manifest, parse_manifest
from shardledger.errors import CheckpointError

LATEST_NAME = "latest"
_LEFTOVER = re.compile(r"^\.(?P<tag>.+)\.(?P<kind>saving|replaced|removing)$")
_AUTOMATIC = re.compile(r"^(?:global_step|step-)(?P<step>\d+)$")


@dataclass(frozen=True)
class Place:
    """Where one checkpoint goes."""

    parent: Path
    tag: str

    @property
    def final(self) -> Path:
        """The complete checkpoint."""
        return self.parent / self.tag

    @property
    def draft(self) -> Path:
        """The folder while it is written."""
        return self.parent / f".{self.tag}.saving"

    @property
    def replaced(self) -> Path:
        """The former one of the same tag."""
        return self.parent / f".{self.tag}.replaced"

    @property
    def removing(self) -> Path:
        """One that is being removed."""
        return self.parent / f".{self.tag}.removing"


def check_tag(tag: object) -> str:
    """The tag as text.

    Raises:
        CheckpointError: it cannot name a folder.
    """
    text = str(tag)
    if not text or text.startswith(".") or text == LATEST_NAME or set(text) & set("/\\\0:"):
        raise CheckpointError(
            f"the tag {text!r} cannot name a checkpoint's folder: no leading dot, no slash or colon, not 'latest'."
        )
    return text


def prepare(files: Files, place: Place) -> int:
    """Make room for a save: remove what crashes have left, make the draft's folder; returns its lock.

    Raises:
        CheckpointError: another run, or another engine, saves this very checkpoint now.
    """
    files.make_folder(place.parent)
    found = leftovers(place.parent)
    alive = {tag for path, tag, kind in found if kind == "saving" and files.in_use(path)}
    if place.tag in alive:
        raise CheckpointError(
            f"{place.final} is being saved by another run or engine at this moment ({place.draft} is in use). Give each "
            f"run a folder of its own, and each engine a tag."
        )
    for path, tag, kind in found:
        if tag in alive:
            continue
        if kind == "replaced" and not is_complete(place.parent / tag):
            files.rename(path, place.parent / tag)  # the crash came between the two renames of ``publish``
        else:
            files.remove(path)
    files.make_folder(place.draft)
    return files.lock(place.draft)


def publish(files: Files, place: Place, manifest: Manifest, *, latest: bool) -> None:
    """Turn the draft, whose files are all on the disk, into the checkpoint."""
    files.write(place.draft / MANIFEST_NAME, manifest.to_json().encode())
    files.sync_folder(place.draft)
    if place.final.exists():
        files.rename(place.final, place.replaced)
    files.rename(place.draft, place.final)
    files.sync_folder(place.parent)
    if latest:
        write_latest(files, place)
    if place.replaced.exists():
        files.remove(place.replaced)


def write_latest(files: Files, place: Place) -> None:
    """Point ``latest`` at the checkpoint."""
    draft = place.parent / f".{LATEST_NAME}.part"
    files.write(draft, place.tag.encode())
    files.rename(draft, place.parent / LATEST_NAME)
    files.sync_folder(place.parent)


def abandon(files: Files, place: Place) -> None:
    """After an error: remove the draft, if the disk lets us."""
    with contextlib.suppress(OSError):
        if place.draft.exists():
            files.remove(place.draft)


def leftovers(parent: Path) -> list[tuple[Path, str, str]]:
    """What interrupted saves have left: path, tag, and ``"saving"``, ``"replaced"`` or ``"removing"``."""
    found = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _LEFTOVER.match(path.name)
        if match and path.is_dir():
            found.append((path, match["tag"], match["kind"]))
    return found


def is_complete(path: Path) -> bool:
    """Whether a folder is a complete checkpoint: its manifest is the last file of it to be written."""
    return (path / MANIFEST_NAME).is_file()


def complete_tags(parent: Path) -> list[str]:
    """Tags of the complete checkpoints in a folder."""
    if not parent.is_dir():
        return []
    return sorted(path.name for path in parent.iterdir() if not path.name.startswith(".") and is_complete(path))


def find(parent: Path, tag: str | None) -> Path | None:
    """The folder of a checkpoint; without a tag, the one that ``latest`` names. None when there is no ``latest``.

    Raises:
        CheckpointError: there is no such checkpoint, or it is not complete.
    """
    source = f"tag={tag!r}"
    if tag is None:
        pointer = parent / LATEST_NAME
        if not pointer.is_file():
            _warn_of_nothing(parent)
            return None
        tag, source = pointer.read_text(encoding="utf-8", errors="replace").strip(), str(pointer)
        if not tag:
            have = ", ".join(complete_tags(parent)) or "none"
            raise CheckpointError(f"{pointer} is empty, so it names no checkpoint. Complete ones in {parent}: {have}.")
    place = Place(parent, check_tag(tag))
    for path in (place.final, place.replaced):
        if is_complete(path):
            return path
    have = ", ".join(complete_tags(parent)) or "none"
    state = "is there, but has no manifest.json" if place.final.is_dir() else "does not exist"
    raise CheckpointError(f"{place.final} ({source}) {state}. Complete checkpoints in {parent}: {have}.")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    file = path / MANIFEST_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Is {path} a checkpoint of shardledger?") from error
    return parse_manifest(text, str(file))


def surplus(parent: Path, keep_last: int | None, keep_every: int | None) -> list[Place]:
    """Checkpoints that retention lets go: only those with automatic tags, never the one that ``latest`` names."""
    if keep_last is None:
        return []
    numbered = sorted((int(m["step"]), tag) for tag in complete_tags(parent) if (m := _AUTOMATIC.match(tag)))
    pointer = parent / LATEST_NAME
    latest = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
    old = numbered[:-keep_last] if keep_last else numbered
    return [
        Place(parent, tag)
        for step, tag in old
        if tag != latest and not (keep_every and step and step % keep_every == 0)
    ]


def remove_surplus(files: Files, places: list[Place]) -> None:
    """Take checkpoints away: first their name, so that no half-removed one is ever taken for a whole one."""
    for place in places:
        files.rename(place.final, place.removing)
        files.remove(place.removing)


def _warn_of_nothing(parent: Path) -> None:
    tags = complete_tags(parent)
    unfinished = [tag for _, tag, kind in leftovers(parent) if kind == "saving"]
    extra = f" It holds {', '.join(tags)}: pass one as tag=." if tags else ""
    extra += f" An interrupted save has left {', '.join(unfinished)}." if unfinished else ""
    warnings.warn(f"load_checkpoint: {parent} has no file 'latest', so nothing was loaded.{extra}", stacklevel=2)
