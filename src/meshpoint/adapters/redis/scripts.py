"""All Lua scripts, each with its purpose. They run on Redis 6.0 and later.

A script for a working memory receives the head and the index as its first two keys. Scripts reply
with a list that starts with a word: `ok`, or the reason of a refusal. Only unexpected failures are
Redis errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and the digest that identifies it to Redis."""

    text: str
    sha: str


def _script(*parts: str) -> Script:
    text = "".join(parts)
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


MAX_COMMAND_ARGS = 4000
"""Maximum arguments of one command. Lua's `unpack` returns at most 8000 values.

It is even, so that field-value pairs are not split."""

_READ_HEAD = (
    f"""
local MAX_ARGS = {MAX_COMMAND_ARGS}
"""
    + """
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local MAX_NAME_BYTES = 200  -- of a run id, or of a lost key in a reply
local MAX_EXACT = 2 ^ 53  -- below this, Lua numbers represent integers exactly
local ELEMENT_BYTES = 8  -- overhead counted per element

local function is_exact(number)
  return number and math.floor(number) == number and math.abs(number) < MAX_EXACT
end

-- Size of an answer in bytes, including the overhead of its elements.
local function size_of(answer)
  if type(answer) == 'string' then return #answer end
  if type(answer) ~= 'table' then return 0 end
  local bytes = 0
  for _, element in ipairs(answer) do bytes = bytes + ELEMENT_BYTES + #element end
  return bytes
end

-- Returns a state, then run, fence and version:
-- 'ok', 'none' (no head), 'lost' (a head without an index), or 'damaged' and the damaged key.
local function read_head()
  local head = redis.pcall('HMGET', KEYS[1], 'run', 'fence', 'version')
  if head.err then return 'damaged', KEYS[1] end
  -- The index always has the member '', so an empty memory still has an index.
  local index = redis.pcall('ZSCORE', KEYS[2], '')
  if type(index) == 'table' then return 'damaged', KEYS[2] end
  if not head[1] and not head[2] and not head[3] then return 'none', '', 0, 0 end
  local fence, version = tonumber(head[2] or ''), tonumber(head[3] or '')
  if not head[1] or #head[1] > MAX_NAME_BYTES or not is_exact(fence) or not is_exact(version) then
    return 'damaged', KEYS[1]
  end
  return index and 'ok' or 'lost', head[1], fence, version
end
"""
)

_CHECK_OWNER = """
-- Returns nil if `run` owns the memory at version `seen` or later, else the refusal.
local function check_owner(run, own_fence, seen)
  local state, owner, fence, version = read_head()
  if state == 'damaged' then return {state, owner} end
  if state == 'none' then return {'lost'} end
  -- A Redis restored from an older state has an earlier run, or an earlier version.
  if owner ~= run and fence < own_fence then return {'lost'} end
  if owner ~= run or fence > own_fence then
    return {'fenced', owner, string.format('%.0f', fence)}
  end
  if state == 'lost' or version < seen then return {'lost'} end
end
"""

_UNLINK = """
-- Delete the keys `prefix .. name` for each of `names`.
local function unlink(prefix, names)
  for first = 1, #names, MAX_ARGS do
    local block = {}
    for i = first, math.min(first + MAX_ARGS - 1, #names) do
      block[#block + 1] = prefix .. names[i]
    end
    redis.call('UNLINK', unpack(block))
  end
end
"""

_TOUCH = """
-- Extend the expiry of the head, the index and the keys at these ranks to `ttl` from now.
local function extend_ttl(ttl, prefix, first, last)
  local expires_at = now_ms() + ttl
  redis.call('PEXPIREAT', KEYS[1], expires_at)
  redis.call('PEXPIREAT', KEYS[2], expires_at)
  local members = redis.call('ZRANGE', KEYS[2], first, last, 'WITHSCORES')
  for i = 1, #members, 2 do
    if members[i] ~= '' then
      redis.call('PEXPIREAT', prefix .. members[i], math.min(expires_at, tonumber(members[i + 1])))
    end
  end
  return {'ok', redis.call('ZCARD', KEYS[2])}
end
"""

_EXECUTE = """
local ttl, offset = tonumber(ARGV[4]), tonumber(ARGV[5])
local seen, limit = tonumber(ARGV[3]), tonumber(ARGV[7])
local refusal = check_owner(ARGV[1], tonumber(ARGV[2]), seen)
if refusal then return refusal end
local version = tonumber(redis.call('HGET', KEYS[1], 'version'))
-- A late write whose caller has given up must not overwrite newer data.
if ARGV[6] == 'w' and seen > 0 and version ~= seen then return {'stale'} end

-- Writes that never delete the key.
local KEEPS_KEY = {SET = 1, INCRBY = 1, INCRBYFLOAT = 1, RPUSH = 1, LPUSH = 1, HSET = 1,
  HINCRBY = 1, SADD = 1, ZADD = 1, ZINCRBY = 1}
-- Commands that may be split into blocks. Their reply is that of the last block, or the sum.
local LAST_REPLY = {RPUSH = 1, LPUSH = 1}
local SUM_REPLIES = {HSET = 1, HDEL = 1, SADD = 1, SREM = 1, ZADD = 1, ZREM = 1}

local now = now_ms()
local old_expiry, expiry, lost = {}, {}, {}  -- own expiry of each key, nil if missing
for i = 3, #KEYS do
  local name = string.sub(KEYS[i], offset)
  local ends_at = tonumber(redis.call('ZSCORE', KEYS[2], name) or nil)
  local exists = redis.call('EXISTS', KEYS[i]) == 1
  if ends_at and ends_at > now then
    if not exists then lost[#lost + 1] = name end
    old_expiry[i], expiry[i] = ends_at, ends_at
  else
    if exists then redis.call('UNLINK', KEYS[i]) end
    if ends_at then redis.call('ZREM', KEYS[2], name) end
  end
end
if #lost > 0 then return {'lost', unpack(lost, 1, math.min(#lost, MAX_ARGS))} end

local TOO_LARGE = 'ERR the answers exceed ' .. string.format('%.0f', limit) .. ' bytes'

-- Run a command that has more arguments than `unpack` can return.
local function call_in_blocks(name, key, first, last)
  local needs_pairs = name == 'HSET' or name == 'ZADD'
  if not SUM_REPLIES[name] and not LAST_REPLY[name] or needs_pairs and (last - first) % 2 == 0 then
    return {err = 'ERR wrong number of arguments'}
  end
  if name == 'ZADD' then  -- check all scores first: ZADD is all or nothing
    for i = first, last, 2 do
      local score = tonumber(ARGV[i])
      if not score or score ~= score then return {err = 'ERR value is not a valid float'} end
    end
  end
  local total = 0
  for at = first, last, MAX_ARGS do
    local answer = redis.pcall(name, key, unpack(ARGV, at, math.min(at + MAX_ARGS - 1, last)))
    if type(answer) ~= 'number' then return answer end
    total = SUM_REPLIES[name] and total + answer or answer
  end
  return total
end

local function apply(name, i, first, last, writes)
  local key = KEYS[i]
  if name == 'PTTL' then
    if not expiry[i] then return -2 end
    return expiry[i] == math.huge and -1 or expiry[i] - now
  end
  if name == 'PERSIST' then
    if not expiry[i] or expiry[i] == math.huge then return 0 end
    expiry[i] = math.huge
    return 1
  end
  local answer
  if last - first < MAX_ARGS then
    answer = redis.pcall(name, key, unpack(ARGV, first, last))
  else
    answer = call_in_blocks(name, key, first, last)
  end
  if type(answer) == 'table' and answer.err or not writes then return answer end
  if name == 'SET' then
    expiry[i] = math.huge
  elseif name == 'PEXPIRE' then
    local ttl_ms = tonumber(ARGV[first])
    if answer == 1 then expiry[i] = ttl_ms > 0 and now + ttl_ms or nil end
  elseif not expiry[i] or not KEEPS_KEY[name] then
    expiry[i] = redis.call('EXISTS', key) == 1 and (expiry[i] or math.huge) or nil
  end
  if name == 'INCRBY' and math.abs(answer) >= MAX_EXACT then return redis.call('GET', key) end
  if name == 'HINCRBY' and math.abs(answer) >= MAX_EXACT then
    return redis.call('HGET', key, ARGV[first])
  end
  return answer
end

local answers, written, failure, bytes, at = {}, {}, nil, 0, 8
while at <= #ARGV do
  local name, i = ARGV[at], tonumber(ARGV[at + 1])
  local writes, size = ARGV[at + 2] == 'w', tonumber(ARGV[at + 3])
  local answer
  if name == 'GET' and bytes + (tonumber(redis.pcall('STRLEN', KEYS[i])) or 0) > limit then
    answer = {err = TOO_LARGE}
  else
    answer = apply(name, i, at + 4, at + 3 + size, writes)
    if writes and not (type(answer) == 'table' and answer.err) then written[i] = true end
    bytes = bytes + size_of(answer)
    if bytes > limit then answer = {err = TOO_LARGE} end
  end
  if type(answer) == 'table' and answer.err then
    failure = {'refused', string.sub(KEYS[i], offset), name, answer.err}
    break
  end
  answers[#answers + 1] = answer
  at = at + 4 + size
end

if next(written) then
  local expires_at = now + ttl
  for i in pairs(written) do
    local name = string.sub(KEYS[i], offset)
    if expiry[i] then
      if expiry[i] ~= old_expiry[i] then redis.call('ZADD', KEYS[2], expiry[i], name) end
      redis.call('PEXPIREAT', KEYS[i], math.min(expires_at, expiry[i]))
    elseif old_expiry[i] then
      redis.call('ZREM', KEYS[2], name)
    end
  end
  version = redis.call('HINCRBY', KEYS[1], 'version', 1)
  redis.call('PEXPIREAT', KEYS[1], expires_at)
  redis.call('PEXPIREAT', KEYS[2], expires_at)
end
return failure or {'ok', version, answers}
"""

_LIST_KEYS = """
local refusal = check_owner(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
if refusal then return refusal end

local prefix, limit, lost = ARGV[4], tonumber(ARGV[5]), {}
local TOO_LARGE = {'refused', '', 'KEYS',
  'ERR the key names exceed ' .. string.format('%.0f', limit) .. ' bytes'}
if redis.call('ZCARD', KEYS[2]) * ELEMENT_BYTES > limit then return TOO_LARGE end
local names = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. string.format('%.0f', now_ms()), '+inf')
if size_of(names) > limit then return TOO_LARGE end
for first = 1, #names, MAX_ARGS do
  local block = {}
  for i = first, math.min(first + MAX_ARGS - 1, #names) do
    if names[i] ~= '' then block[#block + 1] = prefix .. names[i] end
  end
  if #block > 0 and redis.call('EXISTS', unpack(block)) < #block then
    for _, key in ipairs(block) do
      if redis.call('EXISTS', key) == 0 then
        lost[#lost + 1] = string.sub(key, #prefix + 1, #prefix + MAX_NAME_BYTES)
      end
    end
  end
end
if #lost > 0 then return {'lost', unpack(lost, 1, math.min(#lost, MAX_ARGS))} end
return {'ok', names}
"""

_READ = """
local prefix, limit, first, last = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local state, run, fence, version = read_head()
if state == 'damaged' then return cmsgpack.pack({state, run}) end
local READERS = {string = {'GET'}, list = {'LRANGE', 0, -1}, hash = {'HGETALL'},
  set = {'SMEMBERS'}, zset = {'ZRANGE', 0, -1, 'WITHSCORES'}}
local COUNTERS = {list = 'LLEN', hash = 'HLEN', set = 'SCARD', zset = 'ZCARD', string = 'STRLEN'}
local now, total, items, bytes = now_ms(), 0, {}, 0

-- Returns the content of a key, or nil and true if it exceeds the rest of the limit.
local function content_of(key, kind)
  local count = redis.call(COUNTERS[kind], key)
  if bytes + count * (kind == 'string' and 1 or ELEMENT_BYTES) > limit then return nil, true end
  local content = redis.call(READERS[kind][1], key, unpack(READERS[kind], 2))
  local size = size_of(content)
  if bytes + size > limit then return nil, true end
  bytes = bytes + size
  return content
end

if state == 'ok' then
  total = redis.call('ZCARD', KEYS[2])
  local wanted = last < 0 and total or math.min(total, last - first + 1)
  local members = wanted * ELEMENT_BYTES <= limit
    and redis.call('ZRANGE', KEYS[2], first, last, 'WITHSCORES')
  bytes = members and size_of(members) or limit + 1
  if bytes > limit then  -- the key names alone exceed the limit
    members, total = {}, 2
    items[1] = {'', '+inf', 'large'}
  end
  for i = 1, #members, 2 do
    if members[i] ~= '' then
      local key = prefix .. members[i]
      local kind, content, large = redis.call('TYPE', key).ok, nil, nil
      if READERS[kind] then content, large = content_of(key, kind) end
      items[#items + 1] = {members[i], members[i + 1], large and 'large' or kind, content}
    end
  end
end
return cmsgpack.pack({state, now, run, string.format('%.0f', fence), version, total, items})
"""

_ADOPT = """
local run, own_fence, version = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local ttl, prefix, last = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local state, owner, fence, current = read_head()
if state == 'damaged' then return {state, owner} end
if fence and fence > own_fence then return {'fenced', owner, string.format('%.0f', fence)} end
if state ~= 'ok' or current ~= version then return {'changed'} end
redis.call('HSET', KEYS[1], 'run', run, 'fence', ARGV[2])
return extend_ttl(ttl, prefix, 0, last)
"""

_RETAIN = """
local state, owner, fence = read_head()
if state == 'damaged' then return {state, owner} end
if state ~= 'ok' or owner ~= ARGV[1] and fence >= tonumber(ARGV[2]) then return {'other'} end
return extend_ttl(tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6])
"""

_FORGET = """
local state, owner, fence = read_head()
if state == 'damaged' then return {state, owner} end
if state == 'none' or owner ~= ARGV[1] and fence >= tonumber(ARGV[2]) then return {'other'} end
unlink(ARGV[3], redis.call('ZRANGE', KEYS[2], 0, -1))
redis.call('UNLINK', KEYS[1], KEYS[2])
return {'ok'}
"""

_STAGE = """
local WRITERS = {string = 'SET', list = 'RPUSH', hash = 'HSET', set = 'SADD', zset = 'ZADD'}
local COUNTERS = {list = 'LLEN', hash = 'HLEN', set = 'SCARD', zset = 'ZCARD'}
local prefix, ttl = ARGV[1], ARGV[2]
for _, part in ipairs(cmsgpack.unpack(ARGV[3])) do
  local name, kind, ends_at, staged_count, elements = unpack(part)
  local key = prefix .. name
  if staged_count > 0 and redis.call(COUNTERS[kind], key) ~= staged_count then
    return {'incomplete'}
  end
  redis.call(WRITERS[kind], key, unpack(elements))
  redis.call('PEXPIRE', key, ttl)
  redis.call('ZADD', KEYS[1], ends_at, name)
end
redis.call('ZINCRBY', KEYS[1], 1, '')
redis.call('PEXPIRE', KEYS[1], ttl)
return {'ok'}
"""

_SWAP = """
local run, own_fence, ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local prefix, staged = ARGV[4], ARGV[5]
local steps, expected = tonumber(ARGV[6]), tonumber(ARGV[7])
local names = redis.call('ZRANGE', KEYS[3], 0, -1)
local function refuse(...)
  unlink(staged, names)
  redis.call('UNLINK', KEYS[3])
  return {...}
end

local state, owner, fence, version = read_head()
if state == 'damaged' then return refuse(state, owner) end
if fence > own_fence and ARGV[9] ~= '1' then
  return refuse('fenced', owner, string.format('%.0f', fence))
end
-- A late call whose caller has given up must not overwrite newer data.
local seen = tonumber(ARGV[8])
if owner == run and seen and version ~= seen then return refuse('stale') end
local existing = 0
for first = 1, #names, MAX_ARGS do
  local block = {}
  for i = first, math.min(first + MAX_ARGS - 1, #names) do
    block[#block + 1] = staged .. names[i]
  end
  existing = existing + redis.call('EXISTS', unpack(block))
end
if existing ~= expected or tonumber(redis.call('ZSCORE', KEYS[3], '') or 0) ~= steps then
  return refuse('incomplete')
end

local now = now_ms()
local expires_at = now + ttl
unlink(prefix, redis.call('ZRANGE', KEYS[2], 0, -1))
redis.call('UNLINK', KEYS[2])
local members = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
for i = 1, #members, 2 do
  local name, score = members[i], tonumber(members[i + 1])
  if name ~= '' and score <= now then
    redis.call('UNLINK', staged .. name)
    redis.call('ZREM', KEYS[3], name)
  elseif name ~= '' then
    redis.call('RENAME', staged .. name, prefix .. name)
    redis.call('PEXPIREAT', prefix .. name, math.min(expires_at, score))
  end
end
if steps > 0 then redis.call('RENAME', KEYS[3], KEYS[2]) end
redis.call('ZADD', KEYS[2], '+inf', '')
redis.call('PEXPIREAT', KEYS[2], expires_at)
if state == 'none' then
  -- A version that this memory never had, so that earlier readers notice the change.
  local time = redis.call('TIME')
  version = time[1] * 1000000 + time[2]
end
redis.call('HSET', KEYS[1], 'run', run, 'fence', ARGV[2],
           'version', string.format('%.0f', version + 1))
redis.call('PEXPIREAT', KEYS[1], expires_at)
return {'ok', version + 1}
"""

_APPEND_CHUNKS = """
for first = 2, #ARGV, 4000 do
  redis.call('RPUSH', KEYS[1], unpack(ARGV, first, math.min(first + 3999, #ARGV)))
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {'ok'}
"""

_PUT_SNAPSHOT = """
local chunks, meta, staged = KEYS[1], KEYS[2], KEYS[3]
local ttl, digest, order, count, manifest = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local reply = redis.pcall('HGET', meta, 'order')
local stored_order = type(reply) == 'string' and tonumber(reply)
if stored_order and stored_order > tonumber(order) then
  redis.call('UNLINK', staged)
  return {'newer'}
end
if redis.call('LLEN', staged) ~= count then
  redis.call('UNLINK', staged)
  return {'incomplete'}
end
redis.call('UNLINK', chunks, meta)
if count > 0 then
  redis.call('RENAME', staged, chunks)
  redis.call('PEXPIRE', chunks, ttl)
end
redis.call('HSET', meta, 'digest', digest, 'order', order, 'chunks', count, 'manifest', manifest)
for i = 6, #ARGV, 2 do redis.call('HSET', meta, ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', meta, ttl)
return {'ok'}
"""

_GET_SNAPSHOT = """
local limit, bytes, chunks = tonumber(ARGV[1]), 0, {}
local fields = {'digest', 'order', 'chunks', 'manifest', 'timestamp', 'key_count'}
for _, field in ipairs(fields) do
  local length = redis.pcall('HSTRLEN', KEYS[2], field)
  if type(length) == 'table' then return {'damaged', KEYS[2]} end
  bytes = bytes + length
end
if bytes > limit then return {'large', KEYS[2]} end
local meta = redis.call('HMGET', KEYS[2], unpack(fields))
local count = redis.pcall('LLEN', KEYS[1])
if type(count) == 'table' then return {'damaged', KEYS[1]} end
if bytes + count * 8 > limit then return {'large', KEYS[1]} end
for i = 0, count - 1, 16 do
  for _, chunk in ipairs(redis.call('LRANGE', KEYS[1], i, i + 15)) do
    bytes = bytes + #chunk + 8
    if bytes > limit then return {'large', KEYS[1]} end
    chunks[#chunks + 1] = chunk
  end
end
if redis.call('EXISTS', KEYS[1], KEYS[2]) == 0 then return {'none'} end
return {'ok', meta, chunks}
"""

_GET_DIGEST = """
local length = redis.pcall('HSTRLEN', KEYS[1], 'digest')
if type(length) == 'table' or length == 0 or length > tonumber(ARGV[1]) then return {'none'} end
return {'ok', redis.call('HGET', KEYS[1], 'digest')}
"""

EXECUTE = _script(_READ_HEAD, _CHECK_OWNER, _EXECUTE)
"""Execute the owner's commands and update the index, the expiry times and the version."""

LIST_KEYS = _script(_READ_HEAD, _CHECK_OWNER, _LIST_KEYS)
"""List the keys, or the lost ones if there are any."""

READ = _script(_READ_HEAD, _READ)
"""Read the head and the values of the keys at some ranks of the index, as MessagePack.

Thousands of replies in the Redis protocol would take several times as long to read."""

ADOPT = _script(_READ_HEAD, _TOUCH, _ADOPT)
"""Change the owner if the memory still has the version that the caller read."""

RETAIN = _script(_READ_HEAD, _TOUCH, _RETAIN)
"""Extend the expiry of the owner's memory."""

FORGET = _script(_READ_HEAD, _UNLINK, _FORGET)
"""Delete the owner's memory."""

STAGE = _script(_STAGE)
"""Store values, passed as MessagePack, under temporary keys."""

SWAP = _script(_READ_HEAD, _UNLINK, _SWAP)
"""Replace the memory with the staged values, if they are complete, and change the owner."""

APPEND_CHUNKS = _script(_APPEND_CHUNKS)
"""Append chunks of a snapshot to a temporary key."""

PUT_SNAPSHOT = _script(_PUT_SNAPSHOT)
"""Replace the snapshot with the staged chunks, if they are complete and it is not newer."""

GET_SNAPSHOT = _script(_GET_SNAPSHOT)
"""Read a snapshot's fields and chunks at one instant."""

GET_DIGEST = _script(_GET_DIGEST)
"""Read a snapshot's recorded digest, unverified."""
